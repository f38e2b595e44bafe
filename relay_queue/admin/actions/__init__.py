"""What an operator may do at the console: actions on jobs, queues and workers.

``catalogue`` lists the actions. ``perform`` performs one and writes the audit. ``pages``, ``jobs``
and ``queues`` put the buttons on the pages. ``matching`` and ``bulk`` are for everything that
matches a filter: pages and settings call that a bulk act.
"""
