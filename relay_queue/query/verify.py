"""Verify: is what the tables and the files hold what Relay has written?

Read-only, and safe beside live workers. Every statement is a snapshot of its own that lasts for a
few thousand rows. So the write-ahead log can be checkpointed meanwhile, and memory stays bounded
for a queue of any length. The exceptions are SQLite's own check of the whole file and the counting
of all jobs, which each need one long look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from django.db import DatabaseError, transaction

from relay_queue import payload as payload_codec
from relay_queue.db.wal import WalReport, read_wal_in_child
from relay_queue.models import Job, Lease, QueueCount, Worker
from relay_queue.query import reads
from relay_queue.query.verify_rules import Fault, JobRow, LeaseRow, check_job
from relay_queue.validation import is_incarnation

JOBS_PER_RANGE: Final = 5_000
LEASES_PER_RANGE: Final = 50_000
PAYLOAD_CHARS_PER_RANGE: Final = 16 * 1024 * 1024
MOST_FAULTS_KEPT: Final = 1_000
MOST_PAGE_FAULTS: Final = 20
TABLES: Final = {model._meta.db_table for model in (Job, Lease, QueueCount, Worker)}

ESTIMATE = "SELECT COALESCE(SUM(n), 0) FROM relay_queue_queuecount"
"""Tell about how many jobs there are, for the progress."""

RANGE_END = """
    SELECT max(id), count(*) FROM
        (SELECT id FROM relay_queue_job WHERE id > %s ORDER BY id LIMIT %s) AS part
"""
"""Find where a range of so many jobs ends, and how many there are."""

LEDGER_OF_RANGE = """
    SELECT j.id, j.state, j.attempt, j.attempt_base, j.max_attempts, j.finished_at IS NOT NULL,
           l.id, l.attempt, l.ended_at IS NOT NULL, l.ended_at > l.expires_at, l.outcome
    FROM relay_queue_job j LEFT JOIN relay_queue_lease l ON l.job_id = j.id
    WHERE j.id > %s AND j.id <= %s
    ORDER BY j.id, l.id
"""
"""Read a range of jobs with all their leases, in one snapshot."""

LEASES_OF_RANGE = """
    SELECT count(*) FROM
        (SELECT 1 AS one FROM relay_queue_lease WHERE job_id > %s AND job_id <= %s LIMIT %s) AS part
"""
"""Count the leases of a range, and stop at a limit."""

SIGNED_OF_RANGE = """
    SELECT id, queue, backend, task, payload, idempotency_key, checksum
    FROM relay_queue_job WHERE id > %s AND id <= %s ORDER BY id
"""
"""Read what the checksums of a range are made of. These columns never change."""

LEASES_OF_NO_JOB = """
    SELECT l.id, l.job_id FROM relay_queue_lease l
    WHERE NOT EXISTS (SELECT 1 FROM relay_queue_job j WHERE j.id = l.job_id) LIMIT %s
"""
"""Find leases without the job that they were granted for."""

WRONG_COUNTERS = """
    SELECT queue, state, sum(counted), sum(jobs) FROM (
        SELECT queue, state, sum(n) AS counted, 0 AS jobs
        FROM relay_queue_queuecount GROUP BY queue, state
        UNION ALL
        SELECT queue, state, 0 AS counted, count(*) AS jobs
        FROM relay_queue_job GROUP BY queue, state
    ) AS both_sides
    GROUP BY queue, state HAVING sum(counted) <> sum(jobs)
    ORDER BY queue, state
"""
"""Compare the counters with the jobs, in one snapshot."""

WORKERS = """
    SELECT id, incarnation, started_at, heartbeat_at FROM relay_queue_worker ORDER BY id
"""
"""Read what others rely on of a worker's row."""

Progress = Callable[[str, int, int], None]
"""Called with what is being checked, how many jobs are done, and about how many there are."""


@dataclass(slots=True)
class Verification:
    """The answer: what was looked at, and what was wrong.

    At most ``MOST_FAULTS_KEPT`` faults are kept; ``fault_count`` goes on counting. ``notes`` are
    things worth knowing that are no faults.
    """

    jobs: int = 0
    fault_count: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log: WalReport | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.fault_count

    def add(self, fault: Fault) -> None:
        """Count a fault, and keep it if there is room."""
        self.fault_count += 1
        if len(self.faults) < MOST_FAULTS_KEPT:
            self.faults.append(fault)


def verify(
    database_path: str | None = None,
    *,
    jobs_per_range: int = JOBS_PER_RANGE,
    progress: Progress | None = None,
) -> Verification:
    """Check the log, the file, the payloads, the ledger and the counters, in that order.

    ``database_path`` is the SQLite file, None for a database without one; then only the rows are
    checked. The log is read before this function opens a connection, because opening a database
    repairs the torn end of its log. A table that cannot be read is a fault like any other; a
    database that is not reached, or does not let us read, raises its error.
    """
    found = Verification()
    progress = progress or (lambda _what, _done, _total: None)
    if database_path is not None:
        progress("log", 0, 0)
        _verify_log(found, database_path)
        progress("file", 0, 0)
        _verify_file(found)
    try:
        if _has_tables(found):
            if database_path is not None:
                _verify_foreign_keys(found)
            else:
                found.notes.append(
                    "the log and the pages are the server's to check: see pg_amcheck and data "
                    "checksums; payloads, ledger, links and counters were checked here"
                )
                _verify_links(found)
            _verify_jobs(found, jobs_per_range, progress)
            progress("counters", found.jobs, found.jobs)
            _verify_counters(found)
            _verify_workers(found)
    except DatabaseError as error:
        _require_damage(error)
        found.add(Fault("unreadable", f"the rest of the tables: {error}"))
    return found


def _verify_log(found: Verification, database_path: str) -> None:
    """Judge the raw bytes of the write-ahead log, as a child process reads them."""
    if reads.connection().connection is not None:
        found.notes.append(
            "this process had the database open before the log was read, so a torn end may have "
            "been repaired unseen"
        )
    try:
        log = found.log = read_wal_in_child(database_path, timeout_seconds=600)
    except (OSError, TimeoutError) as error:
        found.add(Fault("unreadable", f"the write-ahead log: {error}"))
        return
    if log.changing:
        found.notes.append("the log was being written to at each look; its end was not judged")
    elif log.tail in ("torn", "corrupt", "missing"):
        found.add(Fault(f"log_{log.tail}", f"write-ahead log: {log.tail_reason}"))
    elif log.uncommitted_frames:
        found.notes.append(
            f"the log ends in {log.uncommitted_frames} frames of a transaction that has not "
            "committed: one in progress, or one that was interrupted"
        )


def _verify_file(found: Verification) -> None:
    """Let SQLite check its pages and indexes."""
    try:
        for (line,) in reads.rows(f"PRAGMA integrity_check({MOST_PAGE_FAULTS})"):
            if line != "ok":
                found.add(Fault("database_corrupt", f"SQLite integrity check: {line}"))
    except DatabaseError as error:
        found.add(Fault("database_corrupt", f"SQLite integrity check: {error}"))


def _has_tables(found: Verification) -> bool:
    missing = TABLES - set(reads.connection().introspection.table_names())
    if missing:
        found.add(Fault("tables", f"there is no table {', '.join(sorted(missing))}"))
    return not missing


def _verify_foreign_keys(found: Verification) -> None:
    for _, row, parent, _ in reads.rows("PRAGMA foreign_key_check(relay_queue_lease)"):
        found.add(Fault("foreign_key", f"lease {row} has no row in {parent}", lease_id=row))


def _verify_links(found: Verification) -> None:
    """Look for leases of no job: a server keeps this rule itself, unless its index is damaged."""
    for lease_id, job_id in reads.rows(LEASES_OF_NO_JOB, MOST_PAGE_FAULTS):
        message = f"lease {lease_id} has no row in relay_queue_job, whose id would be {job_id}"
        found.add(Fault("foreign_key", message, lease_id=lease_id))


def _verify_jobs(found: Verification, jobs_per_range: int, progress: Progress) -> None:
    """Check payloads and ledger range by range, so that no snapshot lives long."""
    ((total,),) = reads.rows(ESTIMATE)
    for after, end, jobs in _ranges(jobs_per_range):
        for fault in _range_faults(after, end):
            found.add(fault)
        found.jobs += jobs
        progress("jobs", found.jobs, max(int(total), found.jobs))


def _ranges(jobs_per_range: int) -> Iterator[tuple[int, int, int]]:
    """Yield (after this id, up to this id, jobs in between) until there are no more jobs."""
    after = 0
    while True:
        ((end, jobs),) = reads.rows(RANGE_END, after, jobs_per_range)
        if end is None:
            return
        yield after, end, jobs
        after = end


def _range_faults(after: int, end: int) -> list[Fault]:
    """Return the faults of the jobs in a range of ids.

    Halve it where the rows cannot be read, or where its leases are too many for one snapshot.
    """
    try:
        ((leases,),) = reads.rows(LEASES_OF_RANGE, after, end, LEASES_PER_RANGE + 1)
        if leases <= LEASES_PER_RANGE or end - after == 1:
            return [*_payload_faults(after, end), *_ledger_faults(after, end)]
    except DatabaseError as error:
        _require_damage(error)
        if end - after == 1:
            return [Fault("unreadable", f"job {end} or a lease of it: {error}", end)]
    middle = (after + end) // 2
    return _range_faults(after, middle) + _range_faults(middle, end)


def _require_damage(error: DatabaseError) -> None:
    """Raise an error again that says nothing of what is stored: it was not to be had.

    A server says so of its own; a file whose rows cannot be read may have become anything.
    """
    dialect = reads.dialect()
    trouble = dialect.diagnose(error)
    if trouble != "unknown" and (dialect.has_sessions or trouble not in ("data", "tables")):
        raise error


def _payload_faults(after: int, end: int) -> Iterator[Fault]:
    """Yield the jobs whose checksum does not fit, reading a bounded amount of text at a time."""
    while after < end:
        room = PAYLOAD_CHARS_PER_RANGE
        with _stream(SIGNED_OF_RANGE, after, end) as rows:
            for job_id, queue, backend, task, payload, key, checksum in rows:
                if payload_codec.checksum(queue, backend, task, payload, key) != checksum:
                    message = f"job {job_id} is not the one that was enqueued"
                    yield Fault("checksum", message, job_id)
                after = job_id
                room -= len(payload)
                if room < 0:
                    break
            else:
                return


def _ledger_faults(after: int, end: int) -> Iterator[Fault]:
    """Yield what the rules find, in a second look at the jobs that the first look suspected."""
    with _stream(LEDGER_OF_RANGE, after, end) as rows:
        suspects = [job.id for job, leases in _ledgers(rows) if any(check_job(job, leases))]
    for job_id in suspects:
        with _stream(LEDGER_OF_RANGE, job_id - 1, job_id) as rows:
            for job, leases in _ledgers(rows):
                yield from check_job(job, leases)


def _ledgers(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[JobRow, list[LeaseRow]]]:
    """Group the rows of ``LEDGER_OF_RANGE`` into jobs and their leases."""
    for _, group in groupby(rows, key=itemgetter(0)):
        lines = list(group)
        leases = [LeaseRow._make(line[6:]) for line in lines if line[6] is not None]
        yield JobRow._make(lines[0][:6]), leases


def _verify_counters(found: Verification) -> None:
    for queue, state, counted, jobs in reads.rows(WRONG_COUNTERS):
        message = f"queue {queue!r} counts {counted} {state} jobs and has {jobs}"
        found.add(Fault("counter", message))


def _verify_workers(found: Verification) -> None:
    """Name the workers whose death cannot be proven, and those with values that are no times."""
    from_db = reads.dialect().from_db
    for worker_id, incarnation, *moments in reads.rows(WORKERS):
        if not is_incarnation(incarnation):
            message = f"has the incarnation {incarnation!r}, which is not 32 hexadecimal digits"
            found.add(Fault("worker", f"worker {worker_id} {message}"))
        for moment in moments:
            try:
                from_db(moment)
            except (ValueError, TypeError):
                found.add(Fault("worker", f"worker {worker_id} has {moment!r} for a time"))


@contextmanager
def _stream(statement: str, *params: Any) -> Iterator[Iterable[Sequence[Any]]]:
    """Give the rows of a statement one after the other; the snapshot ends with the block."""
    connection = reads.connection()
    # Outside a transaction a server would first write all rows down, however large their payloads.
    # A file reads on as it is asked to, and there a transaction would take the writer.
    many = reads.dialect().has_sessions
    block = transaction.atomic(connection.alias, savepoint=False) if many else nullcontext()
    with block, connection.chunked_cursor() as cursor:
        cursor.execute(statement, params)
        yield cursor
