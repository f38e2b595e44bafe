"""The laboratory: what ``relay demo``, ``relay drill`` and ``relay bench`` do, on scratch projects.

A scratch project has a folder of its own, and `settings` of its own. Nothing here knows the database
of the project that called the command. A reader follows `project` (a scratch project: its database,
workers and journal), then `demo`, `drill` or `bench`. Each works in processes that `__main__` begins
and `processes` starts and ends. `data` is the one place that fills tables by plain SQL, and `faults`
says what can be done to a worker from inside.

The package is an app of the scratch projects alone: see `tasks`.
"""
