"""What an operator may do at the console: acts on jobs, queues and workers.

``catalogue`` lists the acts on jobs; ``doing`` does one and writes the audit; ``pages``, ``jobs``,
``queues`` and ``workers`` put the buttons on the pages; ``matching`` and ``bulk`` are for everything
that matches a filter.
"""
