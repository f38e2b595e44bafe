"""Lists of rows by the million: each is a walk along one index, a page at a time.

``walk`` reads, ``pages`` numbers, ``criteria`` is what a visitor asked for, ``walks`` chooses the
index, ``filters`` and ``searching`` fill in the criteria, and ``changelist`` puts it all in the
admin's list.
"""
