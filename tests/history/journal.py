"""Records of what clients and functions did and were told: one JSON object a line, append only.

Each line is one write to a file opened with ``O_APPEND``, so the lines of several processes never
mix, and a process that is killed leaves all its earlier lines. What it was doing then has no answer:
an ``invoke`` or ``told`` without one is an outcome that nobody knows.

Kinds and phases:

* ``enqueue``: ``invoke``, then ``ok`` (the commit was reported), ``nothing`` (refused, or rolled
  back), or ``unknown``. Has ``op``, ``label``, and ``due`` where a time was asked for.
* ``run``: ``start`` and ``end`` of a function. Has ``job``, ``lease``, ``attempt``, ``label``, and
  where the writer knows it the digest of the ``token``.
* ``settle``: ``told``, then ``answered``, ``nothing`` or ``unknown``. Has ``op``, ``lease``, ``token``
  and ``verb``; the answer has ``accepted``, ``reason`` and, where the settlement was alone in its
  transaction, ``changes``: how many rows the database saw change in it.
* ``operate``: ``invoke``, then ``ok``, ``nothing`` or ``unknown``. Has ``op``, ``verb``, ``jobs``.
* ``ring``: the bell of an enqueue was heard. Has ``label``, and ``visible``: whether an independent
  reader saw the job at that moment.
* ``worker``: ``start`` and ``death`` of an owner, by the id of its row.
* ``busy``: a verb was refused as busy. ``begun`` says whether its transaction had begun.
* ``error``: a verb met rows that it could not work with. Has ``text``.
* ``fault``: what was done to the system, for the reader of a timeline only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]

DIGEST_CHARS = 12


def digest(token: str) -> str:
    """Return what is written of a token: enough to tell tokens apart, and no token."""
    return hashlib.sha256(token.encode()).hexdigest()[:DIGEST_CHARS]


def encode(record: Record) -> str:
    """Return a record as one line whose bytes depend on nothing but the record."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Journal:
    """The file that all processes of one test append to."""

    path: str

    def note(self, kind: str, phase: str = "", **facts: Any) -> None:
        """Append one record, with the time and the process."""
        now = datetime.now(UTC).isoformat()
        line = encode({"at": now, "pid": os.getpid(), "kind": kind, "phase": phase, **facts})
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def records(self) -> list[Record]:
        """Read all records in the order in which they were written."""
        try:
            lines = Path(self.path).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]


class Operation(NamedTuple):
    """What somebody asked for, and what they know of its outcome.

    ``fate`` is the phase of the answer: ``unknown`` also where there is no answer at all.
    """

    asked: Record
    fate: str
    answer: Record


def operations(records: list[Record], kind: str) -> Iterator[Operation]:
    """Join what was asked and what was answered, by ``op``."""
    answers = {r["op"]: r for r in records if r["kind"] == kind and r["phase"] not in ASKED}
    for record in records:
        if record["kind"] == kind and record["phase"] in ASKED:
            answer = answers.get(record["op"])
            yield Operation(record, answer["phase"] if answer else "unknown", answer or {})


ASKED = ("invoke", "told")
"""The phases that wait for an answer."""
