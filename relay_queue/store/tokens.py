"""Fencing tokens: what only the holder of a lease knows."""

from __future__ import annotations

import os

TOKEN_BYTES = 16
"""Random bytes in a token: nobody guesses 128 bits."""


def draw(count: int) -> list[str]:
    """Return new tokens, 32 hexadecimal digits each."""
    # One draw for all: the system call costs more than the randomness.
    drawn, width = os.urandom(TOKEN_BYTES * count).hex(), TOKEN_BYTES * 2
    return [drawn[place : place + width] for place in range(0, len(drawn), width)]
