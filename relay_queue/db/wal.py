"""What is in an SQLite write-ahead log, read from its raw bytes.

Opening a database with a torn log repairs it, and the last close deletes it. So the log must be
read before any connection opens. This module knows nothing of jobs, imports no other module of the
package and never writes.

The format is SQLite's: a header of 32 bytes, then frames of 24 bytes and one page each, with
checksums that run on from frame to frame.
"""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import BinaryIO, Literal, NamedTuple

Tail = Literal["none", "clean", "stale", "torn", "corrupt", "unread", "missing"]
ByteOrder = Literal["little", "big"]
Salt = tuple[int, int]

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
SALT_ENDS_AT = 16  # In a frame header.
MAGIC = 0x377F0682  # The lowest bit says that checksums read big-endian words.
VERSION = 3007000
PAGE_SIZES = frozenset(2**power for power in range(9, 17))
MASK = 0xFFFFFFFF
INDEX_VERSION = 3007000
INDEX_HEADER_BYTES = 48
"""Of each of the two copies with which the index begins; the number of frames copied follows."""
INDEX_BYTES = 2 * INDEX_HEADER_BYTES + 4
BUFFER_BYTES = 1 << 18

MOST_READS = 4
DOUBTFUL = ("torn", "corrupt", "missing")
"""Ends of a log that another process may have caused between two steps of one look."""

PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class WalReport:
    """The state of one log.

    Frames count from 1, as in SQLite. `tail` says how the log ends after its last valid frame:

    * `none`: there is no log, or it is empty.
    * `clean`: it ends there.
    * `stale`: frames follow that count for nothing: of an older generation, as after every
      restart of the log, or left by a transaction that was rolled back. Not a fault.
    * `torn`: the last transaction is unfinished, cut or damaged. SQLite drops it.
    * `corrupt`: a damaged place follows, and beyond its transaction another commit. SQLite drops
      both.
    * `unread`: the limit was reached first.
    * `missing`: there is no log, but its index names frames that were never copied into the database.
      SQLite removes both together, so something else has removed the log.
    """

    path: str
    exists: bool = False
    size_bytes: int = 0
    header_ok: bool = False
    page_size_bytes: int | None = None
    byte_order: ByteOrder | None = None
    checkpoint_sequence: int | None = None
    salt: Salt | None = None
    frames: int = 0
    """Valid frames of the current generation."""
    commits: int = 0
    last_commit_frame: int = 0
    uncommitted_frames: int = 0
    """Valid frames after the last commit: a transaction in progress, rolled back or killed."""
    database_pages: int | None = None
    """Size of the database in pages after the last commit; None without a commit."""
    valid_bytes: int = 0
    """Header and valid frames."""
    tail: Tail = "none"
    tail_at_frame: int | None = None
    """The first frame that is not valid; None if the log ends before it or the header is bad."""
    tail_reason: str = ""
    changing: bool = False
    """The log was written to at each reading, so a torn or corrupt tail proves nothing."""


class _Header(NamedTuple):
    page_size_bytes: int
    byte_order: ByteOrder
    checkpoint_sequence: int
    salt: Salt
    checksum: Salt
    fault: str

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + self.page_size_bytes


class _Frame(NamedTuple):
    page: int
    database_pages: int
    """Not 0 marks a commit."""
    salt: Salt
    checksum: Salt
    raw: bytes


def read_wal(database_path: str, limit_bytes: int | None = None) -> WalReport:
    """Read the log `<database>-wal` and report what SQLite would recover from it.

    Memory use is constant. Checksums cost about a second for 20 MB; `limit_bytes` bounds how much
    is checked. Under a live writer a half-written frame looks torn, and a log restarted meanwhile
    may look corrupt. So a fault is believed only if two readings in a row, 50 ms apart, find the
    same one. After four different ones the last is returned with `changing` set. Raises `OSError`
    if the log cannot be read.
    """
    path = os.path.realpath(database_path) + "-wal"
    report = _read_once(path, limit_bytes)
    for _ in range(MOST_READS - 1):
        if report.tail not in DOUBTFUL:
            return report
        time.sleep(PAUSE_SECONDS)  # a writer in the middle of a frame needs a moment
        before, report = report, _read_once(path, limit_bytes)
        if (before.salt, before.frames, before.tail) == (report.salt, report.frames, report.tail):
            return report
    return replace(report, changing=report.tail in DOUBTFUL)


def read_wal_in_child(
    database_path: str, timeout_seconds: float = 60, limit_bytes: int | None = None
) -> WalReport:
    """Do `read_wal` in a fresh process, for callers that have the database open.

    A process that opens and closes a file of a database loses SQLite's locks on that file.
    Raises `TimeoutError` after `timeout_seconds`, and `OSError` if the log cannot be read.
    """
    # The file is run by itself, and isolated. So the child needs neither the package nor Django,
    # and this directory, which has a `sqlite3` of its own, is not on its path.
    command = [sys.executable, "-I", __file__, os.path.realpath(database_path)]
    if limit_bytes is not None:
        command.append(str(limit_bytes))
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(
            f"reading the log of {database_path!r} took more than {timeout_seconds} s; "
            "allow more time or set a limit in bytes"
        ) from error
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        raise OSError(f"the log of {database_path!r} could not be read: {reason}")
    values = json.loads(done.stdout)
    if values["salt"] is not None:
        values["salt"] = tuple(values["salt"])
    return WalReport(**values)


def _read_once(path: str, limit_bytes: int | None) -> WalReport:
    try:
        with open(path, "rb", buffering=BUFFER_BYTES) as file:
            report = WalReport(path, exists=True, size_bytes=os.fstat(file.fileno()).st_size)
            return _read(file, report, limit_bytes)
    except FileNotFoundError:
        return _judge_missing(WalReport(path))


def _judge_missing(report: WalReport) -> WalReport:
    """Look in the index what the log held when it was last written to."""
    try:
        with open(report.path.removesuffix("-wal") + "-shm", "rb") as file:
            raw = file.read(INDEX_BYTES)
    except OSError:
        return report
    if len(raw) < INDEX_BYTES:
        return report
    # Native byte order, as it is shared memory; a writer that died half-way leaves unequal copies.
    version, _, _, initialized, *_, last_frame = struct.unpack_from("=3I2BHI", raw)
    (copied,) = struct.unpack_from("=I", raw, 2 * INDEX_HEADER_BYTES)
    known = version == INDEX_VERSION and initialized
    if not known or raw[:INDEX_HEADER_BYTES] != raw[INDEX_HEADER_BYTES : 2 * INDEX_HEADER_BYTES]:
        return report
    if last_frame <= copied:
        return report
    reason = (
        f"there is no log, but its index names {last_frame} committed frames, of which {copied} "
        "were copied into the database"
    )
    return replace(report, tail="missing", tail_reason=reason)


def _read(file: BinaryIO, report: WalReport, limit_bytes: int | None) -> WalReport:
    raw = file.read(HEADER_BYTES)
    if not raw:
        return report
    if len(raw) < HEADER_BYTES:
        reason = f"the header ends after {len(raw)} of {HEADER_BYTES} bytes"
        return replace(report, tail="torn", tail_reason=reason)
    header = _parse_header(raw)
    if header.fault:
        return _report_bad_header(report, header)
    return _scan(file, header, report, limit_bytes)


def _parse_header(raw: bytes) -> _Header:
    magic, version, page_size, sequence, *rest = struct.unpack(">8I", raw)
    byte_order: ByteOrder = "big" if magic & 1 else "little"
    salt, checksum = (rest[0], rest[1]), (rest[2], rest[3])
    fault = ""
    if magic & ~1 != MAGIC:
        fault = f"the header begins with {magic:#010x}, not {MAGIC:#010x} or {MAGIC + 1:#010x}"
    elif page_size not in PAGE_SIZES:
        fault = f"the header names {page_size} bytes as page size, not a power of two in 512-65536"
    elif _checksum((0, 0), raw[:24], byte_order) != checksum:
        fault = "the header does not match its checksum"
    elif version != VERSION:
        fault = f"the header names format version {version}; only {VERSION} is known"
    return _Header(page_size, byte_order, sequence, salt, checksum, fault)


def _report_bad_header(report: WalReport, header: _Header) -> WalReport:
    """SQLite takes a log with a bad header for empty, and ignores what follows."""
    if report.size_bytes == HEADER_BYTES:
        return replace(report, tail="torn", tail_reason=f"{header.fault}; no frames follow")
    return replace(
        report, tail="corrupt", tail_reason=f"{header.fault}; SQLite ignores the frames after it"
    )


def _scan(file: BinaryIO, header: _Header, report: WalReport, limit_bytes: int | None) -> WalReport:
    """Count valid frames from the start, then name what stopped the count."""
    checksum = header.checksum
    frames = commits = last_commit = pages = 0
    tail: tuple[Tail, str] = ("clean", "")
    for frame in _frames(file, header):
        if limit_bytes is not None and file.tell() > limit_bytes:
            tail = ("unread", f"the limit of {limit_bytes} bytes was reached")
            break
        computed = _frame_checksum(checksum, frame, header)
        if computed is None or _flaw(frame, computed, header):
            tail = _explain(file, header, frame, computed, frames + 1)
            break
        checksum = computed
        frames += 1
        if frame.database_pages:
            commits, last_commit, pages = commits + 1, frames, frame.database_pages
    return replace(
        report,
        header_ok=True,
        page_size_bytes=header.page_size_bytes,
        byte_order=header.byte_order,
        checkpoint_sequence=header.checkpoint_sequence,
        salt=header.salt,
        frames=frames,
        commits=commits,
        last_commit_frame=last_commit,
        uncommitted_frames=frames - last_commit,
        database_pages=pages or None,
        valid_bytes=HEADER_BYTES + frames * header.frame_bytes,
        tail=tail[0],
        tail_at_frame=None if tail[0] == "clean" else frames + 1,
        tail_reason=tail[1],
    )


def _frames(file: BinaryIO, header: _Header) -> Iterator[_Frame]:
    """Yield the frames from the file's position on; the last one may be cut short."""
    while raw := file.read(header.frame_bytes):
        page, pages, salt1, salt2, sum1, sum2 = struct.unpack(
            ">6I", raw[:FRAME_HEADER_BYTES].ljust(FRAME_HEADER_BYTES, b"\0")
        )
        yield _Frame(page, pages, (salt1, salt2), (sum1, sum2), raw)


def _flaw(frame: _Frame, computed: Salt | None, header: _Header) -> str:
    """Say why SQLite would stop at this frame; empty if it would not."""
    if computed is None:
        return f"the file ends {len(frame.raw)} bytes into it"
    if frame.salt != header.salt:
        return "it carries other salts than the header"
    if frame.page == 0:
        return "it names page 0"
    return "" if computed == frame.checksum else "it does not match its checksum"


def _explain(
    file: BinaryIO, header: _Header, bad: _Frame, computed: Salt | None, number: int
) -> tuple[Tail, str]:
    """Judge the first invalid frame by what it holds and by what lies beyond it.

    Only frames of this generation carry the header's salts, so a commit among them beyond the
    damage was written after it. The first may end the damaged transaction itself. After a power cut
    any part of what was not synced may be missing, the middle too, and no commit of it was
    reported. Another one began when that transaction was safe.
    """
    reason = f"frame {number}: {_flaw(bad, computed, header)}"
    current = bad.salt == header.salt
    if not current and computed == bad.checksum:
        # Salts are not part of the checksum, and no other generation could have continued it.
        return "corrupt", f"{reason}, though its checksum continues this generation"
    following = next(_frames(file, header), None)
    commits = _commits_from(file, header, following, number + 1)
    end = number if _is_commit(bad, header) else next(commits, None)
    if later := next(commits, None):
        return "corrupt", f"{reason}, and frame {later} beyond its transaction is a commit"
    if end not in (None, number):
        return "torn", f"{reason}; its transaction ends in frame {end} and is the last"
    return _judge_end(header, bad, following, reason)


def _judge_end(
    header: _Header, bad: _Frame, following: _Frame | None, reason: str
) -> tuple[Tail, str]:
    """Tell a cut write from harmless leftovers, where no commit lies beyond."""
    current = bad.salt == header.salt
    if len(bad.raw) < header.frame_bytes and (current or len(bad.raw) < SALT_ENDS_AT):
        return "torn", reason
    if not current:
        if not any(bad.raw[:FRAME_HEADER_BYTES]):
            return "torn", f"{reason}: zeros, space that was never written"
        return "stale", f"{reason}: left from an older generation"
    if following and _frame_checksum(bad.checksum, following, header) == following.checksum:
        return "stale", f"{reason}: left from a transaction that was rolled back"
    last = "it is the last commit" if bad.database_pages else "no commit lies at or beyond it"
    return "torn", f"{reason}; {last}"


def _commits_from(
    file: BinaryIO, header: _Header, frame: _Frame | None, number: int
) -> Iterator[int]:
    """Yield the numbers of the whole commits of this generation from `frame` on."""
    while frame is not None:
        if _is_commit(frame, header) and len(frame.raw) == header.frame_bytes:
            yield number
        frame = next(_frames(file, header), None)
        number += 1


def _is_commit(frame: _Frame, header: _Header) -> bool:
    return frame.database_pages != 0 and frame.salt == header.salt


def _frame_checksum(checksum: Salt, frame: _Frame, header: _Header) -> Salt | None:
    """Continue `checksum` over a frame; None if the frame is cut short."""
    if len(frame.raw) < header.frame_bytes:
        return None
    # Page number and database size are covered; salts and the checksum itself are not.
    checksum = _checksum(checksum, frame.raw[:8], header.byte_order)
    return _checksum(checksum, frame.raw[FRAME_HEADER_BYTES:], header.byte_order)


def _checksum(checksum: Salt, data: bytes, byte_order: ByteOrder) -> Salt:
    """Continue SQLite's log checksum over `data`, a multiple of 8 bytes."""
    sum1, sum2 = checksum
    words = iter(struct.unpack(f"{'<' if byte_order == 'little' else '>'}{len(data) // 4}I", data))
    for first, second in zip(words, words, strict=True):
        sum1 = (sum1 + first + sum2) & MASK
        sum2 = (sum2 + second + sum1) & MASK
    return sum1, sum2


def main(arguments: list[str]) -> int:
    """Write the report on the database named first as JSON; a second argument limits bytes."""
    limit_bytes = int(arguments[1]) if len(arguments) > 1 else None
    try:
        report = read_wal(arguments[0], limit_bytes)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
