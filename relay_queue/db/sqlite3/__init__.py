"""The Django engine: ``ENGINE: "relay_queue.db.sqlite3"``."""
