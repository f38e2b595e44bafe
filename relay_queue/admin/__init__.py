"""The console: Django admin pages over the tables of the queue."""
