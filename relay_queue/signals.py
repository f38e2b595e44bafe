"""Signals of Relay's own, beside those of the task framework: the life of a worker process.

Both are sent in the worker process, in its main thread, outside of any job. What a receiver raises
is logged and changes nothing.
"""

from __future__ import annotations

from django.dispatch import Signal

worker_process_started = Signal()
"""A worker process begins; it has claimed nothing yet. Start here what needs a thread or a connection.

Arguments: ``sender`` is None; ``name`` is the worker's name (text).
"""

worker_process_stopping = Signal()
"""A worker process ends; its functions have returned or were given up. Send here what is kept back.

Sent before the exit handlers of ``atexit``, and within the same time limit. Arguments: ``sender`` is
None; ``name`` is the worker's name (text); ``exit_code`` is what the process will end with (int).
"""
