"""Power cuts: the writes and syncs of a real load, and every disk that they may have left."""

INIT_VARIABLE = "RELAY_POWER_INIT"
"""Names what SQLite connections of a recorded load run first."""
