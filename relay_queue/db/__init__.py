"""SQLite made fair: the writer gate and the Django engine built on it; and what is true of any connection.

This layer knows nothing of jobs and imports nothing else of Relay.
"""
