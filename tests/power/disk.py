"""A disk under a power cut: what was synced is there, of the rest anything may be.

`Disk` follows the record of the shim. At any point `image` gives what the disk may hold if the
power fails there: each unsynced write is dropped, kept, or torn at the borders of sectors, in an
order that need not be the one in which the writes were made. What SQLite relies on is kept: bytes
outside of a write stay as they are, and names change in order, as on a file system with a journal.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

HEAD = struct.Struct("<c3xIQQI4x")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the record: see ``shim.c`` for the kinds."""

    kind: str
    pid: int
    inode: int
    offset: int
    data: bytes


def read_record(path: Path) -> list[Record]:
    """Read the whole record, in the order in which things happened."""
    raw = path.read_bytes()
    found, at = [], 0
    while at < len(raw):
        kind, pid, inode, offset, length = HEAD.unpack_from(raw, at)
        at += HEAD.size
        found.append(Record(kind.decode(), pid, inode, offset, raw[at : at + length]))
        at += length
    assert at == len(raw), "the record ends in the middle of an entry"
    return found


@dataclass(slots=True)
class File:
    """What is safe of a file, and what has been asked for since: (offset, data) or (size, None)."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            apply(self.safe, *change)
        self.pending.clear()


def apply(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write to a file, or set its size. A hole reads as zeros."""
    if data is None:
        del content[offset:]
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    if data is not None:
        content[offset : offset + len(data)] = data


class Fate(Enum):
    """What becomes of writes that were not synced."""

    DROPPED = "all dropped"
    KEPT = "all kept"
    CUT = "kept up to a point, the last one torn"
    LATEST = "the last ones kept, the earlier dropped"
    REORDERED = "any sector kept or dropped"


class Disk:
    """The files of one database as the disk has them, followed through a record."""

    def __init__(self, database: Path, content: bytes) -> None:
        self._database = str(database)
        self._first: bytes | None = content
        self._files: dict[int, File] = {}  # by the inode that each has now
        self._names: dict[str, File] = {}
        self._renames: list[tuple[str, File | None]] = []

    def apply(self, record: Record) -> None:
        """Follow one line of the record."""
        match record.kind:
            case "C":
                # The system may give it the inode of a file whose end is not on the disk yet.
                file = self._files[record.inode] = File()
                self._renames.append((record.data.decode(), file))
            case "O":
                self._meet(record)
            case "W":
                self._files[record.inode].pending.append((record.offset, record.data))
            case "T":
                self._files[record.inode].pending.append((record.offset, None))
            case "S":
                self._files[record.inode].sync()
            case "D":
                self._names = self._named(len(self._renames))
                self._renames.clear()
            case "U":
                self._renames.append((record.data.decode(), None))

    def _meet(self, record: Record) -> None:
        """Learn the inode of the database itself, which was there before the record began."""
        if record.inode not in self._files:
            assert record.data.decode() == self._database, record
            assert self._first is not None, "the database file was replaced"
            file = self._files[record.inode] = File(bytearray(self._first))
            self._names[self._database] = file
            self._first = None

    def _named(self, changes: int) -> dict[str, File]:
        names = dict(self._names)
        for name, file in self._renames[:changes]:
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file
        return names

    @property
    def unsafe(self) -> bool:
        """Whether a power cut now could lose anything."""
        return bool(self._renames) or any(file.pending for file in self._files.values())

    def image(self, fate: Fate, sector: int, dice: random.Random) -> dict[str, bytes]:
        """Return the files that the disk may hold after a power cut now, by name."""
        changes = {Fate.DROPPED: 0, Fate.KEPT: len(self._renames)}.get(
            fate, dice.randint(0, len(self._renames))
        )
        return {
            name: bytes(_content(file, fate, sector, dice))
            for name, file in self._named(changes).items()
        }


def _content(file: File, fate: Fate, sector: int, dice: random.Random) -> bytearray:
    content = bytearray(file.safe)
    pieces = [piece for change in file.pending for piece in _pieces(*change, sector)]
    for piece in _survivors(pieces, fate, dice):
        apply(content, *piece)
    return content


def _pieces(offset: int, data: bytes | None, sector: int) -> Iterator[tuple[int, bytes | None]]:
    """Cut a write at the borders of sectors: a disk writes each of them whole or not at all."""
    if data is None:
        yield offset, None
        return
    at = 0
    while at < len(data):
        end = min(len(data), at + sector - (offset + at) % sector)
        yield offset + at, data[at:end]
        at = end


def _survivors(
    pieces: list[tuple[int, bytes | None]], fate: Fate, dice: random.Random
) -> list[tuple[int, bytes | None]]:
    choose: dict[Fate, Callable[[], list[tuple[int, bytes | None]]]] = {
        Fate.DROPPED: list,
        Fate.KEPT: lambda: pieces,
        Fate.CUT: lambda: pieces[: dice.randint(0, len(pieces))],
        Fate.LATEST: lambda: pieces[dice.randint(0, len(pieces)) :],
        Fate.REORDERED: lambda: _some(pieces, dice),
    }
    return choose[fate]()


def _some(
    pieces: list[tuple[int, bytes | None]], dice: random.Random
) -> list[tuple[int, bytes | None]]:
    share = dice.choice([0.1, 0.5, 0.9])
    return [piece for piece in pieces if dice.random() < share]
