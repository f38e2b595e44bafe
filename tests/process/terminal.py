"""A command on a terminal, as a person sees it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence

from tests.conftest import ROOT

COLUMNS = 80


def on_a_terminal(
    command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Run a command to its end on a terminal of 80 columns.

    Returns its exit code and what it wrote without colours. It has ``seconds`` to end after it
    has closed the terminal.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 65536):
            said += chunk
    except OSError:
        # Linux says so when the other end is closed.
        pass
    finally:
        os.close(ours)
    return process.wait(seconds), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode())


def widest(text: str) -> int:
    """Return the length of the longest line; what is drawn over begins after a carriage return."""
    return max(len(line) for line in re.split(r"[\r\n]+", text))
