"""The runtime: processes that claim jobs and run them."""
