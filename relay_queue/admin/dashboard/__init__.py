"""The dashboard: the state of all queues and workers, on one page that refreshes itself."""
