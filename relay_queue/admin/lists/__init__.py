"""Lists of millions of rows: each page is a scan of one index from some place in it.

``filters`` and ``searching`` fill in the criteria of a request. `relay_queue.query.list_plans`
chooses the index for them, and `relay_queue.query.lists` reads it. ``changelist`` is the admin's
list on top of these, in numbered pages.
"""
