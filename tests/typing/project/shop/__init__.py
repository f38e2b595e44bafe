"""The app of the example project."""
