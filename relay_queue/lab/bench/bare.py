"""Bare drivers doing the same row changes: what this machine gives without Relay.

On a file: the same tables, indexes, file system, log and ``synchronous=FULL``; no Django, no tokens
to check, no time limits, and no fairness. On a server: loops as a plain queue has them. Imports
nothing of Django at its start, since processes of its own run it too.
"""

from __future__ import annotations

import multiprocessing
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from relay_queue import clock
from relay_queue.lab.bench.figures import timed
from relay_queue.lab.processes import LabError

BUSY_SECONDS: Final = 20.0
WARM_UP_SECONDS: Final = 1.0

INSERT: Final = "INSERT INTO bare_job ({columns}) VALUES ({marks})"
PICK: Final = (
    "SELECT id FROM bare_job WHERE queue = ? AND state = 'ready' ORDER BY rank, id LIMIT ?"
)
START: Final = """
    UPDATE bare_job SET state = 'running', attempt = attempt + 1, started_at = ? WHERE id = ?
"""
GRANT: Final = """
    INSERT INTO bare_lease (job_id, attempt, token, worker_id, acquired_at, expires_at, error,
                            traceback, refused_verb, refused_reason)
    VALUES (?, 1, ?, 1, ?, ?, '', '', '', '')
"""
END: Final = "UPDATE bare_lease SET ended_at = ?, outcome = 'acked' WHERE id = ? AND token = ?"
SUCCEED: Final = (
    "UPDATE bare_job SET state = 'succeeded', finished_at = ?, result = 'null' WHERE id = ?"
)
COUNT: Final = "UPDATE bare_queuecount SET n = n + ? WHERE queue = ? AND state = ?"

COPY: Final = """
    INSERT INTO bare_job ({columns})
    SELECT {columns} FROM relay_queue_job CROSS JOIN generate_series(1, %s) LIMIT %s
"""
COLUMNS: Final = """
    SELECT attname FROM pg_attribute WHERE attrelid = 'relay_queue_job'::regclass
    AND attnum > 0 AND NOT attisdropped AND attname <> 'id'
"""
TAKE: Final = """
    SELECT id FROM bare_job WHERE queue = 'default' AND state = 'ready'
    ORDER BY rank, id LIMIT 1 FOR UPDATE SKIP LOCKED
"""
FINISH: Final = "UPDATE bare_job SET state = 'succeeded', finished_at = now() WHERE id = %s"

NEW: Final = {
    "state": "ready",
    "attempt": 0,
    "started_at": None,
    "finished_at": None,
    "result": None,
}
"""What a job that has run already is given back to be the model of a new one."""

_Held = tuple[int, str, int]
"""Lease id, token, job id."""


class Bare:
    """A database with copies of Relay's tables, worked by plain statements. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, which `like` has made."""
        self._connection = connect(path)
        model = self._connection.execute("SELECT * FROM bare_template")
        names = [column[0] for column in model.description]
        self._template: tuple[Any, ...] = model.fetchone()
        self._insert = INSERT.format(columns=", ".join(names), marks=_marks(names))
        self._queue = self._template[names.index("queue")]

    @classmethod
    def like(cls, path: Path, relay: Path) -> Bare:
        """Make ``path`` with the tables of the Relay database ``relay`` and one of its jobs.

        The tables have other names, so that nothing here can be taken for a write of Relay's.
        """
        with (
            closing(sqlite3.connect(f"file:{relay}?mode=ro", uri=True)) as source,
            closing(connect(path)) as copy,
        ):
            _copy_tables(source, copy)
            _copy_model(source, copy)
        return cls(path)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def insert(self, jobs: int = 1) -> None:
        """Insert like rows in one transaction."""
        self._begin()
        if jobs == 1:
            self._connection.execute(self._insert, self._template)
        else:
            self._connection.executemany(self._insert, [self._template] * jobs)
        self._commit()

    def claim(self, limit: int) -> list[_Held]:
        """Start up to ``limit`` jobs and grant their leases, inside the caller's transaction."""
        run, now = self._connection.execute, str(clock.now().replace(tzinfo=None))
        held: list[_Held] = []
        for (job_id,) in run(PICK, (self._queue, limit)).fetchall():
            run(START, (now, job_id))
            token = secrets.token_hex(16)
            lease_id = run(GRANT, (job_id, token, now, now)).lastrowid or 0
            held.append((lease_id, token, job_id))
        self._move("ready", "running", len(held))
        return held

    def ack(self, held: Sequence[_Held]) -> None:
        """End leases and finish their jobs, inside the caller's transaction."""
        run, now = self._connection.execute, str(clock.now().replace(tzinfo=None))
        for lease_id, token, job_id in held:
            run(END, (now, lease_id, token))
            run(SUCCEED, (now, job_id))
        self._move("running", "succeeded", len(held))

    def rate(self, jobs: int, batch: int) -> float:
        """Return jobs a second: each commit acks the last batch and claims the next."""
        self.insert(jobs)
        began = time.perf_counter()
        held: list[_Held] = []
        while True:
            self._begin()
            if held:
                self.ack(held)
            held = self.claim(batch)
            self._commit()
            if not held:
                return jobs / (time.perf_counter() - began)

    def two_commit_seconds(self, jobs: int) -> float:
        """Return the time to claim and ack jobs one by one, with a commit for each of the two."""
        self.insert(jobs)
        began = time.perf_counter()
        for _ in range(jobs):
            self._begin()
            held = self.claim(1)
            self._commit()
            self._begin()
            self.ack(held)
            self._commit()
        return time.perf_counter() - began

    def claim_seconds(self, jobs: int) -> list[float]:
        """Return how long each of ``jobs`` claims of one job took, with its commit."""
        self.insert(jobs)
        return [timed(self._claim_one) for _ in range(jobs)]

    def _claim_one(self) -> None:
        self._begin()
        self.claim(1)
        self._commit()

    def _move(self, from_state: str, to_state: str, n: int) -> None:
        self._connection.execute(COUNT, (-n, self._queue, from_state))
        self._connection.execute(COUNT, (n, self._queue, to_state))

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._connection.execute("COMMIT")


def _copy_tables(source: sqlite3.Connection, copy: sqlite3.Connection) -> None:
    for (statement,) in source.execute(
        "SELECT sql FROM sqlite_master WHERE sql LIKE '%relay_queue_%' ORDER BY type DESC"
    ):
        copy.execute(statement.replace("relay_queue_", "bare_"))


def _copy_model(source: sqlite3.Connection, copy: sqlite3.Connection) -> None:
    """Keep one job, as it was when it was new, as the model of all rows; begin to count."""
    cursor = source.execute("SELECT * FROM relay_queue_job ORDER BY id LIMIT 1")
    row, names = cursor.fetchone(), [column[0] for column in cursor.description]
    if row is None:
        raise LabError("there is no job to take as the model of a row")
    job = {**dict(zip(names, row, strict=True)), **NEW}
    del job["id"]
    copy.execute(f"CREATE TABLE bare_template ({', '.join(job)})")
    copy.execute(f"INSERT INTO bare_template VALUES ({_marks(job)})", [*job.values()])
    copy.executemany(
        "INSERT INTO bare_queuecount (queue, state, shard, n) VALUES (?, ?, 0, 0)",
        [(job["queue"], state) for state in ("ready", "running", "succeeded")],
    )


def _marks(columns: Sized) -> str:
    return ", ".join("?" * len(columns))


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that is as durable as Relay's."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def ungated_fairness(path: Path, processes: int, seconds: float, batch: int) -> float:
    """Return smallest ÷ largest number of commits of writers that meet on SQLite's own lock."""
    _, commits = race(contend, (path, seconds, batch), processes)
    return float(min(commits) / max(commits))


def contend(begin: float, results: Any, path: Path, seconds: float, batch: int) -> None:
    """Insert rows until the time is over, and put the number of commits."""
    with Bare(path) as bare:
        commits = 0
        wait_for_start(begin)
        while time.monotonic() < begin + seconds:
            bare.insert(batch)
            commits += 1
        results.put(commits)


def one_by_one(address: Mapping[str, Any], jobs: int, processes: int) -> float:
    """Return the jobs a second of loops that take and finish one job in each transaction.

    What a plain queue on a server does: pick with SKIP LOCKED, mark as done, commit. The jobs are in
    a copy of Relay's table with its indexes; there are no leases, no tokens and no counters.
    """
    import psycopg

    with psycopg.connect(**address, autocommit=True) as server:
        server.execute("CREATE TABLE bare_job (LIKE relay_queue_job INCLUDING ALL)")
        columns = ", ".join(name for (name,) in server.execute(COLUMNS).fetchall())
        server.execute(COPY.format(columns=columns).encode(), [jobs, jobs])
        server.execute("UPDATE bare_job SET state = 'ready', finished_at = NULL, attempt = 0")
        server.execute("VACUUM ANALYZE bare_job")
    begin, ends = race(empty, (address,), processes)
    done = sum(count for count, _ in ends)
    if done != jobs:
        raise LabError(f"the bare loops finished {done:,} of {jobs:,} jobs")
    seconds: float = max(end for _, end in ends) - begin
    return jobs / seconds


def empty(begin: float, results: Any, address: Mapping[str, Any]) -> None:
    """Take and finish jobs until there are none; put their number, and when it was over."""
    import psycopg

    with psycopg.connect(**address, prepare_threshold=0) as server:
        wait_for_start(begin)
        done = 0
        while True:
            with server.transaction():
                found = server.execute(TAKE).fetchone()
                if found is not None:
                    server.execute(FINISH, found)
            if found is None:
                break
            done += 1
        results.put((done, time.monotonic()))


def race(
    work: Callable[..., Any], arguments: Sequence[Any], processes: int
) -> tuple[float, list[Any]]:
    """Run ``work(begin, results, *arguments)`` in processes of its own; return the begin and results.

    ``begin`` is on the monotonic clock, the same for all; each does `wait_for_start` and puts one
    result. Raises `LabError` if one fails.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    begin = time.monotonic() + WARM_UP_SECONDS
    racers = [
        context.Process(target=work, args=(begin, results, *arguments)) for _ in range(processes)
    ]
    try:
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        if any(racer.exitcode for racer in racers):
            raise LabError(f"{work.__name__} failed in a process of its own; its error is above")
    finally:
        for racer in racers:
            if racer.is_alive():
                racer.kill()
    return begin, [results.get() for _ in racers]


def wait_for_start(begin: float) -> None:
    """Sleep until all begin."""
    time.sleep(max(0.0, begin - time.monotonic()))  # the first to be ready would look faster
