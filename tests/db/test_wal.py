"""What the raw bytes of a log say, compared with what SQLite recovers from the same bytes."""

import random
import shutil
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from relay_queue.db import wal
from relay_queue.db.wal import FRAME_HEADER_BYTES, HEADER_BYTES, read_wal, read_wal_in_child
from tests.conftest import wait_until

# Ends without closing, so the log stays as it is.
CRASHING_WRITER = """
import os, sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
c.execute(f"PRAGMA page_size={sys.argv[2]}")
c.execute("PRAGMA journal_mode=WAL")
c.execute("PRAGMA wal_autocheckpoint=0")
def insert(rows, size=200):
    c.executemany("INSERT INTO t(x) VALUES (?)", [(os.urandom(size),) for _ in range(rows)])
exec(sys.argv[3])
sys.stdout.flush()
os._exit(0)
"""
FIVE_COMMITS = """
c.execute("CREATE TABLE t(x)")
for rows in (1, 40, 1, 60):
    c.execute("BEGIN"); insert(rows); c.execute("COMMIT")
"""


def write_and_crash(database: Path, source: str = FIVE_COMMITS, page_size: int = 4096) -> Path:
    """Run `source` on the database in a process that dies, and return the path of the log."""
    arguments = [sys.executable, "-c", CRASHING_WRITER, str(database), str(page_size), source]
    subprocess.run(arguments, check=True, timeout=120)
    return log_of(database)


def log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


def recovered_by_sqlite(database: Path, scratch: Path) -> tuple[int, int]:
    """Return the frames and the database pages that SQLite finds in a copy of the database."""
    scratch.mkdir(exist_ok=True)
    copy = scratch / "copy.sqlite3"
    for old in scratch.iterdir():
        old.unlink()
    shutil.copyfile(database, copy)
    shutil.copyfile(log_of(database), log_of(copy))
    with closing(sqlite3.connect(copy)) as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        frames = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
    # Zero means a new, empty log to SQLite, and -1 that the database is not in WAL mode.
    return max(frames, 0), pages


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def offset_of(frame: int, page_size: int = 4096) -> int:
    return HEADER_BYTES + (frame - 1) * (FRAME_HEADER_BYTES + page_size)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "some.sqlite3"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "PAUSE_SECONDS", 0)


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
def test_frames_commits_and_pages_are_those_sqlite_recovers(
    database: Path, tmp_path: Path, page_size: int
) -> None:
    log = write_and_crash(database, page_size=page_size)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame, report.tail_reason) == ("clean", None, "")
    assert (report.exists, report.header_ok, report.page_size_bytes) == (True, True, page_size)
    # Switching to WAL is not in the log; creating the table is.
    assert report.commits == 5
    assert report.uncommitted_frames == 0
    assert report.size_bytes == report.valid_bytes == log.stat().st_size
    assert report.byte_order == sys.byteorder
    assert (report.last_commit_frame, report.database_pages) == recovered_by_sqlite(
        database, tmp_path / "scratch"
    )


def test_a_missing_log_and_an_empty_one_are_no_fault(database: Path) -> None:
    report = read_wal(str(database))
    assert (report.exists, report.tail, report.frames) == (False, "none", 0)
    log_of(database).touch()
    report = read_wal(str(database))
    assert (report.exists, report.tail, report.header_ok) == (True, "none", False)


def test_a_log_is_found_through_a_link_to_its_database(database: Path, tmp_path: Path) -> None:
    write_and_crash(database)
    link = tmp_path / "link.sqlite3"
    link.symlink_to(database)
    assert read_wal(str(link)).path == str(log_of(database))
    assert read_wal(str(link)).commits == 5


def test_frames_after_the_last_commit_are_counted_apart(database: Path, tmp_path: Path) -> None:
    spill = FIVE_COMMITS + 'c.execute("PRAGMA cache_size=5"); c.execute("BEGIN"); insert(2000)'
    write_and_crash(database, spill)
    report = read_wal(str(database))
    assert report.tail == "clean"
    assert report.commits == 5
    assert report.uncommitted_frames == report.frames - report.last_commit_frame > 20
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0]


def test_frames_of_a_generation_before_the_restart_are_stale(
    database: Path, tmp_path: Path
) -> None:
    restart = FIVE_COMMITS + 'c.execute("PRAGMA wal_checkpoint(RESTART)"); insert(1)'
    write_and_crash(database, restart)
    report = read_wal(str(database))
    assert (report.tail, report.commits, report.checkpoint_sequence) == ("stale", 1, 1)
    assert report.tail_at_frame == report.frames + 1
    assert "older generation" in report.tail_reason
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0]


def test_a_stale_frame_cut_by_the_journal_size_limit_is_no_fault(database: Path) -> None:
    limited = FIVE_COMMITS + (
        'c.execute("PRAGMA journal_size_limit=9000");'
        'c.execute("PRAGMA wal_checkpoint(RESTART)"); insert(1)'
    )
    log = write_and_crash(database, limited)
    assert (log.stat().st_size - HEADER_BYTES) % (FRAME_HEADER_BYTES + 4096) != 0
    assert read_wal(str(database)).tail == "stale"


def test_frames_of_a_rolled_back_transaction_are_stale(database: Path, tmp_path: Path) -> None:
    rolled_back = FIVE_COMMITS + (
        'c.execute("PRAGMA cache_size=5"); c.execute("BEGIN"); insert(2000);'
        'c.execute("ROLLBACK"); insert(1)'
    )
    write_and_crash(database, rolled_back)
    report = read_wal(str(database))
    assert (report.tail, report.commits) == ("stale", 6)
    assert "rolled back" in report.tail_reason
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0]


@pytest.mark.parametrize("kept", [1, 15, 23, 24, 2000])
def test_a_frame_cut_short_is_a_torn_tail(database: Path, tmp_path: Path, kept: int) -> None:
    log = write_and_crash(database)
    last = read_wal(str(database)).frames
    with log.open("r+b") as file:
        file.truncate(offset_of(last) + kept)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame, report.commits) == ("torn", last, 4)
    assert f"{kept} bytes into it" in report.tail_reason
    assert not report.changing
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0]


def test_a_flipped_bit_in_the_last_commit_is_a_torn_tail(database: Path) -> None:
    log = write_and_crash(database)
    last = read_wal(str(database)).frames
    flip(log, offset_of(last) + 1000)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame, report.commits) == ("torn", last, 4)
    assert "it is the last commit" in report.tail_reason


def test_a_commit_cut_short_beyond_the_damage_does_not_make_it_corruption(database: Path) -> None:
    log = write_and_crash(database)
    last = read_wal(str(database)).frames
    flip(log, offset_of(last - 1) + 1000)
    with log.open("r+b") as file:
        file.truncate(offset_of(last) + 2000)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame, report.commits) == ("torn", last - 1, 4)
    assert "no commit lies at or beyond it" in report.tail_reason


@pytest.mark.parametrize("pages", [1, 0], ids=["sector", "frame"])
def test_a_last_transaction_without_its_middle_is_a_torn_tail(database: Path, pages: int) -> None:
    """A power cut leaves any part of what was not synced: its commit may be there, too."""
    log = write_and_crash(database)
    report = read_wal(str(database))
    missing = report.frames - 1
    content = bytearray(log.read_bytes())
    start = offset_of(missing) + pages * FRAME_HEADER_BYTES
    content[start : offset_of(missing + 1)] = bytes(offset_of(missing + 1) - start)
    log.write_bytes(content)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame, report.commits) == ("torn", missing, 4)
    assert f"ends in frame {missing + 1} and is the last" in report.tail_reason


def test_space_that_was_never_written_is_a_torn_tail(database: Path) -> None:
    log = write_and_crash(database)
    frames = read_wal(str(database)).frames
    with log.open("r+b") as file:
        file.truncate(offset_of(frames + 3))
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame, report.commits) == ("torn", frames + 1, 5)
    assert "zeros" in report.tail_reason


@pytest.mark.parametrize(
    ("part", "offset"),
    [("page number", 3), ("salt", 9), ("checksum", 17), ("page", FRAME_HEADER_BYTES + 77)],
)
def test_a_flipped_bit_before_a_commit_is_corruption(
    database: Path, tmp_path: Path, part: str, offset: int
) -> None:
    log = write_and_crash(database)
    flip(log, offset_of(4) + offset, bit=5)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame) == ("corrupt", 4), part
    assert "frame 4" in report.tail_reason
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0] < 4


def test_a_flipped_bit_in_the_salt_of_the_last_frame_is_corruption(database: Path) -> None:
    log = write_and_crash(database)
    last = read_wal(str(database)).frames
    flip(log, offset_of(last) + 10)
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame) == ("corrupt", last)
    assert "continues this generation" in report.tail_reason


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(0, "begins with"), (11, "page size"), (14, "checksum"), (18, "checksum"), (31, "checksum")],
)
def test_a_flipped_bit_in_the_header_is_corruption(
    database: Path, tmp_path: Path, offset: int, reason: str
) -> None:
    log = write_and_crash(database)
    flip(log, offset)
    report = read_wal(str(database))
    assert (report.tail, report.header_ok, report.frames) == ("corrupt", False, 0)
    assert reason in report.tail_reason
    assert recovered_by_sqlite(database, tmp_path / "scratch")[0] == 0


@pytest.mark.parametrize("size", [1, 31])
def test_a_header_cut_short_is_a_torn_tail(database: Path, size: int) -> None:
    log = write_and_crash(database)
    with log.open("r+b") as file:
        file.truncate(size)
    report = read_wal(str(database))
    assert (report.tail, report.header_ok) == ("torn", False)
    assert f"{size} of 32 bytes" in report.tail_reason


def test_a_bad_header_without_frames_is_a_torn_tail(database: Path) -> None:
    log_of(database).write_bytes(bytes(HEADER_BYTES))
    report = read_wal(str(database))
    assert (report.tail, report.header_ok) == ("torn", False)


def test_a_log_with_big_endian_checksums_is_read(database: Path, tmp_path: Path) -> None:
    log = write_and_crash(database)
    expected = read_wal(str(database))
    other = "big" if expected.byte_order == "little" else "little"
    log.write_bytes(resealed(log.read_bytes(), other))
    report = read_wal(str(database))
    assert report.byte_order == other
    assert (report.frames, report.commits, report.tail) == (expected.frames, 5, "clean")
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0]


def resealed(raw: bytes, byte_order: str = sys.byteorder) -> bytes:
    """Return a log with all its checksums made right, as a machine of `byte_order` writes it."""
    big = byte_order == "big"
    sums = (0, 0)

    def add(data: bytes) -> bytes:
        nonlocal sums
        for first, second in struct.iter_unpack(">II" if big else "<II", data):
            one = (sums[0] + first + sums[1]) % 2**32
            sums = (one, (sums[1] + second + one) % 2**32)
        return struct.pack(">2I", *sums)

    head = bytes([*raw[:3], raw[3] & ~1 | big]) + raw[4:24]
    written = [head, add(head)]
    step = FRAME_HEADER_BYTES + 4096
    for start in range(HEADER_BYTES, len(raw), step):
        frame = raw[start : start + step]
        add(frame[:8])
        written += [frame[:16], add(frame[24:]), frame[24:]]
    return b"".join(written)


def test_an_unknown_format_version_is_named(database: Path, tmp_path: Path) -> None:
    log = write_and_crash(database)
    flip(log, 7)
    log.write_bytes(resealed(log.read_bytes()))
    report = read_wal(str(database))
    assert (report.tail, report.header_ok, report.frames) == ("corrupt", False, 0)
    assert "version 3007001" in report.tail_reason
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        recovered_by_sqlite(database, tmp_path / "scratch")


def test_a_frame_for_page_zero_ends_the_log(database: Path, tmp_path: Path) -> None:
    log = write_and_crash(database)
    raw = bytearray(log.read_bytes())
    raw[offset_of(4) : offset_of(4) + 4] = bytes(4)
    log.write_bytes(resealed(bytes(raw)))
    report = read_wal(str(database))
    assert (report.tail, report.tail_at_frame) == ("corrupt", 4)
    assert "page 0" in report.tail_reason
    assert report.last_commit_frame == recovered_by_sqlite(database, tmp_path / "scratch")[0]


@pytest.mark.usefixtures("no_pause")
def test_after_any_damage_the_report_and_sqlite_agree_on_the_last_commit(
    database: Path, tmp_path: Path
) -> None:
    chance = random.Random(20)
    log = write_and_crash(database, page_size=512)
    whole = log.read_bytes()
    commits_end = read_wal(str(database)).last_commit_frame
    for number in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.choice([0, 1, 1, 2])):
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        if number % 3 == 0:
            del damaged[chance.randrange(len(whole)) :]
        log.write_bytes(damaged)
        report = read_wal(str(database))
        found = report.last_commit_frame
        assert found == recovered_by_sqlite(database, tmp_path / "scratch")[0], number
        # A commit that SQLite loses to a flipped bit is never passed over in silence.
        if found < commits_end and len(damaged) == len(whole):
            assert report.tail in ("torn", "corrupt"), number


def test_a_frame_completed_between_two_readings_is_no_fault(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_and_crash(database)
    whole = log.read_bytes()
    log.write_bytes(whole[:-100])
    monkeypatch.setattr("relay_queue.db.wal.time.sleep", lambda _: log.write_bytes(whole))
    report = read_wal(str(database))
    assert (report.tail, report.commits, report.changing) == ("clean", 5, False)


def test_a_log_that_changes_at_each_reading_is_said_to_be_changing(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_and_crash(database)
    sizes = iter(range(4))

    def cut_another_frame(_: float) -> None:
        with log.open("r+b") as file:
            file.truncate(offset_of(5 - next(sizes)) + 100)

    cut_another_frame(0)
    monkeypatch.setattr("relay_queue.db.wal.time.sleep", cut_another_frame)
    report = read_wal(str(database))
    assert (report.tail, report.changing) == ("torn", True)


def test_a_living_writer_is_never_taken_for_a_fault(database: Path) -> None:
    endless = 'c.execute("PRAGMA wal_autocheckpoint=50"); c.execute("CREATE TABLE t(x)")\n'
    endless += "while True: insert(3)"
    command = [sys.executable, "-c", CRASHING_WRITER, str(database), "4096", endless]
    with subprocess.Popen(command) as writer:
        try:
            wait_until(lambda: read_wal(str(database)).checkpoint_sequence)
            for _ in range(100):
                report = read_wal(str(database))
                assert report.tail in ("clean", "stale") or report.changing, report
        finally:
            writer.kill()


def test_a_limit_ends_the_reading_and_says_so(database: Path) -> None:
    write_and_crash(database)
    report = read_wal(str(database), limit_bytes=offset_of(4))
    assert (report.tail, report.frames, report.tail_at_frame) == ("unread", 3, 4)
    assert str(offset_of(4)) in report.tail_reason


def test_a_child_process_reports_the_same(database: Path) -> None:
    write_and_crash(database)
    assert read_wal_in_child(str(database)) == read_wal(str(database))
    limit = offset_of(4)
    assert read_wal_in_child(str(database), limit_bytes=limit) == read_wal(str(database), limit)
    assert read_wal_in_child(str(database) + "-missing").tail == "none"


def test_a_child_process_leaves_the_locks_of_its_caller_alone(database: Path) -> None:
    connection = sqlite3.connect(database, isolation_level=None)
    with closing(connection):
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t(x)")
        connection.execute("BEGIN IMMEDIATE")
        assert read_wal_in_child(str(database)).commits == 1
        rival = f"import sqlite3; sqlite3.connect({str(database)!r}, 0).execute('BEGIN IMMEDIATE')"
        attempt = subprocess.run([sys.executable, "-c", rival], check=False, capture_output=True)
        assert b"database is locked" in attempt.stderr


def test_a_log_that_cannot_be_read_is_an_error_that_names_it(database: Path) -> None:
    log_of(database).mkdir()
    with pytest.raises(IsADirectoryError):
        read_wal(str(database))
    with pytest.raises(OSError, match=r"some\.sqlite3.*could not be read.*directory"):
        read_wal_in_child(str(database))


def test_a_child_that_takes_too_long_is_ended(database: Path) -> None:
    with pytest.raises(TimeoutError, match="allow more time"):
        read_wal_in_child(str(database), timeout_seconds=0.001)


def test_a_log_that_was_removed_after_a_crash_is_missed(database: Path) -> None:
    log = write_and_crash(database)
    frames = read_wal(str(database)).frames
    log.unlink()
    report = read_wal(str(database))
    assert (report.tail, report.exists) == ("missing", False)
    assert f"names {frames} committed frames, of which 0 were copied" in report.tail_reason


@pytest.mark.parametrize("why", ["all was copied", "no index", "short index", "torn index"])
def test_a_log_is_not_missed_if_nothing_says_that_it_held_anything(
    database: Path, why: str
) -> None:
    checkpoint = "c.execute('PRAGMA wal_checkpoint(PASSIVE)')" if why == "all was copied" else ""
    write_and_crash(database, FIVE_COMMITS + checkpoint).unlink()
    index = database.with_name(f"{database.name}-shm")
    if why == "no index":
        index.unlink()
    elif why == "short index":
        index.write_bytes(index.read_bytes()[:90])
    elif why == "torn index":
        index.write_bytes(b"\0" + index.read_bytes()[1:])
    assert read_wal(str(database)).tail == "none"


def test_a_log_in_use_and_one_of_a_clean_end_are_not_missed(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t(x)")
        assert read_wal_in_child(str(database)).tail == "clean"
    assert read_wal(str(database)).tail == "none"
