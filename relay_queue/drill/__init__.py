"""The drill: the failure table, executed against scratch databases with real workers and signals.

A reader follows `crew` (runs rows side by side, in processes of their own) → `__main__` (one such
process) → `rows` (which function executes which row) → `ground` (the scratch project of a row).
``promises`` holds the words. What a row observes comes from the ledger of its scratch database and
from the journal of its functions; `observation` compares it with what was promised.

Rows go through Django's connection and know no vendor. What they do to a database from outside is one
of their `means`, which `on_file` and `on_server` have each their own way for.
"""
