"""Seeded simulation: the real store on a scratch SQLite file, with everything that is chance dealt out.

One random generator per seed decides who acts next, what they do, what the clock shows, which tokens
are drawn and which faults strike. So a seed is a whole history, and it replays exactly::

    python -m tests.simulation --seeds 100000 --first 0
    python -m tests.simulation --seed 17

Each actor has a database connection of its own, as if it were a process. Transactions run in one
thread; another actor may try its luck between any two statements. There is no writer gate: no safety
may rest on it. ``synchronous`` is off: what a power cut leaves is the business of other tests.
"""
