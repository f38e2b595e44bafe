"""The page of one job: the way it took, its attempts, what it was called with, and its relatives."""
