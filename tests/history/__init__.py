"""What clients and functions saw, written down outside Relay, and the checker that compares it.

`journal` writes and reads the records, `witness` lets the database itself note each committed
change, `ledger` reads the tables by plain SQL, and `checker` holds all of it against the promises.
"""
