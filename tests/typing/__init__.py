"""A small project that uses every option, for the type checker."""
