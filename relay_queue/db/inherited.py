"""Connections that a child must not keep when a function of its parent forks it.

A server notices the death of a process by the end of its connections. A child that outlives its
parent would keep them open, and with them the locks and the transactions of that moment.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet


class HasDescriptor(Protocol):
    """Something with a descriptor: a socket, or a driver's connection."""

    def fileno(self) -> int:
        """Return the descriptor; may raise when it is closed."""


_lines: WeakSet[HasDescriptor] = WeakSet()


def keep_from_children(line: HasDescriptor) -> None:
    """Let every child that is forked from now on let go of ``line`` without telling the server.

    In the child the descriptor stays open and leads to a file that discards what is sent. So a
    driver that ends its session there does not end the parent's. Nor does it write into a file that
    has got the number since.
    """
    _lines.add(line)


def _let_go() -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for line in list(_lines):
        with suppress(Exception):  # closed meanwhile; each driver raises another error then
            os.dup2(nothing, line.fileno(), inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
