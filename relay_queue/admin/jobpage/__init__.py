"""The page of one job: its path through the states, its attempts, its arguments, and related jobs."""
