"""Prune: delete old finished jobs, workers, bulk acts and statistics, a bounded bite at a time.

A bite is bounded in leases, too: one job may have a hundred thousand. Such a job loses its oldest
leases first, and goes with its newest. In between it is a job whose ledger begins later, which
`relay verify` knows as such by the ``KEPT_LEASES`` that it still has at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from relay_queue.states import KEPT_LEASES, NOT_ACKED, TERMINAL, State, sql_list
from relay_queue.store.dialects import marks
from relay_queue.store.transaction import Transaction
from relay_queue.store.transitions import moved

FIND_OLD = """
    SELECT id, queue FROM relay_queue_job
    WHERE state = %s AND finished_at < %s ORDER BY finished_at LIMIT %s{lock}
"""
"""Find the oldest finished jobs: a probe of the finished index."""

DELETE_LEASES = "DELETE FROM relay_queue_lease WHERE job_id IN ({ids})"
"""Delete the ledger first: a lease must not outlive its job."""

COUNT_LEASES = """
    SELECT COUNT(*) FROM
        (SELECT 1 AS one FROM relay_queue_lease WHERE job_id IN ({ids}) LIMIT %s) AS few
"""
"""Count the leases of jobs, and stop at a limit."""

DELETE_OLDEST = """
    DELETE FROM relay_queue_lease WHERE id IN (
        SELECT id FROM relay_queue_lease WHERE job_id = %s ORDER BY id LIMIT %s)
"""
"""Delete the oldest leases of one job."""

_UNCHARGED_OF = f"""
    FROM relay_queue_lease l WHERE l.job_id = {{job}} AND l.outcome = {{outcome}}
    AND l.refused_verb = '' AND l.outcome IN ({sql_list(NOT_ACKED)}) ORDER BY l.id DESC
"""

FIND_LONG = f"""
    WITH given (job_id, outcome) AS ({{rows}})
    SELECT given.job_id, given.outcome FROM given WHERE EXISTS (
        SELECT 1 {_UNCHARGED_OF.format(job="given.job_id", outcome="given.outcome")}
        LIMIT 1 OFFSET {2 * KEPT_LEASES})
"""
"""Find the jobs with too many leases of one uncharged outcome. The list of outcomes says nothing
new: with it the index of the leases that are not acked serves."""

LONG_CASTS = ("bigint", "text")

DELETE_UNCHARGED = f"""
    DELETE FROM relay_queue_lease WHERE id IN (
        SELECT l.id {_UNCHARGED_OF.format(job="%s", outcome="%s")}
        LIMIT %s OFFSET {KEPT_LEASES}{{lock}})
"""
"""Delete all but the newest leases of one job and outcome. One whose owner came back late stays: it
is evidence."""

DELETE_JOBS = "DELETE FROM relay_queue_job WHERE id IN ({ids}) AND state = %s"
"""Delete the jobs, if they are still what was found. Not by time again: that would make the database
walk all old jobs instead of looking up these."""

OLD_WORKERS = """
    relay_queue_worker w WHERE w.stopped_at < %s
    AND NOT EXISTS (SELECT 1 FROM relay_queue_lease l
                    WHERE l.worker_id = w.id AND l.ended_at IS NULL)
"""

DELETE_WORKERS = f"""
    DELETE FROM relay_queue_worker WHERE id IN (SELECT w.id FROM {OLD_WORKERS} LIMIT %s)
"""
"""Delete workers that stopped long ago and hold nothing."""

DELETE_MINUTES = """
    DELETE FROM relay_queue_queueminute WHERE id IN (
        SELECT id FROM relay_queue_queueminute WHERE minute < %s ORDER BY minute LIMIT %s)
"""
"""Delete statistics of old minutes."""

OLD_BULK_ACTS = """
    relay_queue_bulkact b
    WHERE b.finished_at < %s OR (b.finished_at IS NULL AND b.created_at < %s
        AND b.job_id IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM relay_queue_job j WHERE j.id = b.job_id))
"""

DELETE_BULK_ACTS = f"""
    DELETE FROM relay_queue_bulkact WHERE id IN (
        SELECT b.id FROM {OLD_BULK_ACTS} ORDER BY b.id LIMIT %s)
"""
"""Delete bulk acts that ended long ago, or that cannot go on because their job is gone."""


MOST_LEASES: Final = 1000
"""Leases that one transaction deletes at the most."""


OLD_RUNS = """
    relay_queue_schedulerun r WHERE r.fired_at < %s AND EXISTS (
        SELECT 1 FROM relay_queue_schedulerun newer
        WHERE newer.schedule_id = r.schedule_id AND newer.slot_at > r.slot_at)
"""
"""The old runs of schedules, but for the newest of each."""

DELETE_RUNS = f"""
    DELETE FROM relay_queue_schedulerun WHERE id IN (
        SELECT r.id FROM {OLD_RUNS} ORDER BY r.fired_at LIMIT %s)
"""
"""Delete old runs of schedules, but for the newest of each."""


class Pruned(NamedTuple):
    """What one bite did: how many ``jobs`` are gone, and whether there may be ``more`` to delete.

    A bite of a long ledger deletes no job, and there is more.
    """

    jobs: int
    more: bool


def prune(tx: Transaction, state: State, finished_before: datetime, limit: int = 1000) -> Pruned:
    """Delete up to ``limit`` jobs of a terminal state that finished before a time, with leases.

    At most ``MOST_LEASES`` leases go in one call, so call it until there is no more. Raises
    ``ValueError`` for a state that is not terminal.
    """
    if state not in TERMINAL:
        raise ValueError(f"jobs that are {state!r} are not finished and cannot be pruned")
    before = tx.dialect.to_db(finished_before)
    statement = FIND_OLD.format(lock=tx.dialect.skip_locked)
    rows = tx.fetch(statement, [State(state).value, before, limit])
    deleted = delete_finished(tx, rows, State(state))
    return Pruned(deleted, len(rows) == limit or deleted < len(rows))


def delete_finished(tx: Transaction, rows: Sequence[Sequence[Any]], state: State) -> int:
    """Delete the first of some jobs, as many as there is room for; return how many.

    ``rows`` have a job's id and queue first. The jobs are in ``state``, which is terminal, and the
    caller has locked them. If the first one alone has more than ``MOST_LEASES`` leases, its oldest
    are deleted instead, and it stays.
    """
    fitting = _fitting(tx, [(row[0], row[1]) for row in rows])
    if fitting:
        ids = [job_id for job_id, _ in fitting]
        listed = marks(len(ids))
        tx.execute(DELETE_LEASES.format(ids=listed), ids)
        tx.execute(DELETE_JOBS.format(ids=listed), [*ids, state.value])
        moved(tx, fitting, state, None)
    elif rows:
        # Fewer than fit, so that the job keeps enough for `relay verify` to know why some are gone.
        tx.execute(DELETE_OLDEST, [rows[0][0], MOST_LEASES - KEPT_LEASES])
    return len(fitting)


def _fitting(tx: Transaction, rows: Sequence[tuple[int, str]]) -> Sequence[tuple[int, str]]:
    """Return the longest of the first halves of ``rows`` whose leases fit into one transaction."""
    while rows:
        ids = [job_id for job_id, _ in rows]
        statement = COUNT_LEASES.format(ids=marks(len(ids)))
        ((leases,),) = tx.fetch(statement, [*ids, MOST_LEASES + 1])
        if leases <= MOST_LEASES:
            break
        rows = rows[: len(rows) // 2]
    return rows


def shorten_ledgers(tx: Transaction, jobs: Sequence[tuple[int, str]]) -> None:
    """Delete old uncharged leases of jobs that have far too many.

    ``jobs`` are ids with the uncharged outcome that one more lease of theirs has just had. A
    function may snooze each second for years. From ``2 * KEPT_LEASES`` leases of an outcome on, all
    but the newest ``KEPT_LEASES`` go, at most ``MOST_LEASES`` in one call. So neither the attempts,
    which count charged leases, nor the verdict on a job change.
    """
    room = MOST_LEASES
    params = [value for pair in jobs for value in pair]
    for job_id, outcome in tx.rows(FIND_LONG, LONG_CASTS, params):
        if room > 0:
            statement = DELETE_UNCHARGED.format(lock=tx.dialect.skip_locked)
            room -= tx.execute(statement, [job_id, outcome, room])


def prune_workers(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` workers that stopped before a time; return how many."""
    return tx.execute(DELETE_WORKERS, [tx.dialect.to_db(before), limit])


def prune_minutes(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` rows of statistics of minutes before a time; return how many."""
    return tx.execute(DELETE_MINUTES, [tx.dialect.to_db(before), limit])


def prune_bulk_acts(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` bulk acts that ended before a time; return how many.

    One that did not end goes by the time at which it was asked for, once its job is gone.
    """
    moment = tx.dialect.to_db(before)
    return tx.execute(DELETE_BULK_ACTS, [moment, moment, limit])


def prune_runs(tx: Transaction, before: datetime, limit: int = 1000) -> int:
    """Delete up to ``limit`` runs of schedules that were fired before a time; return how many.

    The newest run of a schedule stays.
    """
    return tx.execute(DELETE_RUNS, [tx.dialect.to_db(before), limit])
