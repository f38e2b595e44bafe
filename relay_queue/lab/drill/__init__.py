"""The drill: the failure table, executed on scratch projects with real workers and signals.

A reader follows `runner` (executes rows side by side, in processes of their own) → `rows` (which
function executes which row) → the rows themselves. `results` has the words: what is promised, and what
a row has observed. A row observes what the ledger of its project and the journal of its functions say.

Rows go through Django's connection and know no vendor. What they do to a database from outside is the
business of `injector`, which has two ways for it: for a file, and for a server.
"""
