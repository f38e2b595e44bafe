"""The page of one job: its path through the states, attempts, arguments, and related jobs."""
