"""SQLite made fair: the writer gate and the Django engine built on it.

This layer knows nothing of jobs and imports nothing else of Relay.
"""
