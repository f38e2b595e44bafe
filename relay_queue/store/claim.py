"""Claim: which ready jobs are taken, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from relay_queue.states import State
from relay_queue.store.grant import (
    PICKED,
    Pick,
    draw_tokens,
    grant,
    grant_one,
    pick_columns,
    start_and_grant,
)
from relay_queue.store.records import SUSPECT_LOSSES, Claim
from relay_queue.store.transaction import Transaction
from relay_queue.store.trial import Trial, TrialStep, sound_job

PICK = """
    SELECT {columns} FROM relay_queue_job
    WHERE queue = %s AND state = 'ready'{condition}
    ORDER BY rank, id LIMIT %s{lock}
"""
"""Find the first ready jobs of one queue: a probe of the ready index."""

STILL_UNLIMITED = """ AND EXISTS (
        SELECT 1 FROM relay_queue_queue q
        WHERE q.name = %s AND q.paused_at IS NULL AND q.max_running IS NULL)"""
"""Part of ``PICK``: the queue is neither paused nor limited."""

HOLD_LIMITED = """
    SELECT name FROM relay_queue_queue
    WHERE name IN ({{ids}}) AND max_running IS NOT NULL ORDER BY name{lock}
"""
"""Keep other claims from queues that limit them. In the order of names, so that two of them never
deadlock."""

HAS_READY = """(SELECT j.id FROM relay_queue_job j WHERE j.queue = q.name AND j.state = 'ready'{only}
        ORDER BY j.rank, j.id LIMIT 1) IS NOT NULL"""
"""Part of statements on queues ``q``: there is a ready job. The first one is asked for by its place
in the ready index. Asked whether any exists, PostgreSQL reads the table from its begin if many are
ready, and finds them behind all the finished ones."""

CLAIMABLE = f"""
    SELECT q.name, CASE WHEN q.max_running IS NULL THEN NULL ELSE q.max_running -
        (SELECT CAST(COALESCE(SUM(c.n), 0) AS bigint) FROM relay_queue_queuecount c
         WHERE c.queue = q.name AND c.state = 'running') END
    FROM relay_queue_queue q
    WHERE q.name IN ({{ids}}) AND q.paused_at IS NULL
      AND {HAS_READY.format(only="")}
"""
"""Find the queues that have ready jobs, and how many leases each still allows."""

MOST_TRIED = 64
"""Jobs that a trial looks at, at least, to find those that can be taken."""

_Probe = Callable[[str, Sequence[Any]], list[Pick]]
"""Finds the first ready jobs of a queue that fulfil a condition."""

_unlimited: set[tuple[str, str]] = set()
"""The alias of the database and the name of each queue that had no limit when last looked at."""

_Condition = tuple[str, Sequence[Any]]
"""A condition that ``PICK`` adds, with the parameters of the whole statement but the last."""


@dataclass(slots=True)
class QueueCandidates:
    """The ready jobs of one queue, in their order, and how many leases it allows."""

    picks: Iterator[Pick]
    room: int

    def next_pick(self, suspects_allowed: int) -> Pick | None:
        """Return the next job, or None if there is none, or no room."""
        if self.room < 1:
            return None
        for pick in self.picks:
            if not pick[1] or suspects_allowed > 0:
                self.room -= 1
                return pick
        return None


def round_robin(candidates: list[QueueCandidates], limit: int, suspects: int) -> list[Pick]:
    """Pick one job at a time round the queues, up to ``limit``; return the picks in that order."""
    picked: list[Pick] = []
    while candidates and len(picked) < limit:
        for queue in list(candidates):
            given = queue.next_pick(suspects)
            if given is None:
                candidates.remove(queue)
                continue
            picked.append(given)
            suspects -= given[1]
            if len(picked) == limit:
                break
    return picked


def claim(
    tx: Transaction,
    *,
    worker_id: int | None,
    queues: Sequence[str],
    limit: int,
    suspects: int = 1,
    lease_seconds: float | None = None,
    backends: Sequence[str] | None = None,
    trial: Trial | None = None,
) -> list[Claim]:
    """Take up to ``limit`` ready jobs; return them with their leases, in the order of the picks.

    Places are picked one at a time round the queues in the order given, inside a queue by rank.
    Paused queues, and those at ``max_running``, are skipped. At most ``suspects`` jobs that cost
    two owners in a row are taken. ``lease_seconds`` replaces what the jobs ask for; ``backends``
    restricts to jobs enqueued through these aliases. A job whose checksum does not fit goes dead.
    With a ``trial`` each job is taken in a savepoint of its own, and a job whose row is proven to
    be at fault goes dead. Without one such a row raises.
    """
    if limit < 1 or backends == []:
        return []
    single = _single_queue(tx, queues, backends)
    if single is not None and tx.dialect.has_writable_ctes and trial is None:
        if claims := _start_and_grant(tx, single, limit, worker_id, lease_seconds):
            return claims
        single = None
    probe = partial(_probe, tx, PICKED if trial else pick_columns(tx.dialect.clock))
    # In a trial some jobs will not be taken. They must not hide those behind them.
    wanted = limit if trial is None else max(limit, MOST_TRIED)
    picked = round_robin(_candidates_of_single(probe, single, wanted), wanted, suspects)
    if not picked:
        picked = round_robin(_candidates(tx, probe, queues, wanted, backends), wanted, suspects)
    if trial is None:
        return grant(tx, picked, worker_id, lease_seconds)
    step: TrialStep[int, Claim] = TrialStep(
        "claim jobs",
        lambda where, job_id: grant_one(where, job_id, worker_id, lease_seconds),
        job_of=lambda job_id: job_id,
        control=lambda where, queue, item: grant_one(
            where, sound_job(where, queue), worker_id, lease_seconds
        ),
        goes_to=lambda where, item: State.RUNNING,
    )
    return trial.each(tx, step, [pick[0] for pick in picked], enough=limit)


def _single_queue(
    tx: Transaction, queues: Sequence[str], backends: Sequence[str] | None
) -> _Condition | None:
    """Return how to search one queue that had no limit. The search itself asks whether that holds."""
    if len(queues) != 1 or (tx.connection.alias, queues[0]) not in _unlimited:
        return None
    where, params = _among(backends)
    return STILL_UNLIMITED + where, [queues[0], queues[0], *params]


def _start_and_grant(
    tx: Transaction,
    single: _Condition,
    limit: int,
    worker_id: int | None,
    lease_seconds: float | None,
) -> list[Claim]:
    where, params = single
    return start_and_grant(
        tx,
        _pick("ctid AS place, losses", where, tx.dialect.skip_locked),
        [*params, limit],
        worker_id=worker_id,
        lease_seconds=lease_seconds,
        drawn=draw_tokens(limit),
    )


def _candidates_of_single(
    probe: _Probe, single: _Condition | None, limit: int
) -> list[QueueCandidates]:
    if single is None:
        return []
    return [QueueCandidates(_picks(probe, *single, limit, limit), limit)]


def _candidates(
    tx: Transaction,
    probe: _Probe,
    queues: Sequence[str],
    limit: int,
    backends: Sequence[str] | None,
) -> list[QueueCandidates]:
    """Return the candidates of all queues that have ready jobs and room."""
    claimable = _claimable(tx, queues, limit)
    # A queue's fair share first; more only if the others leave places.
    share = -(-limit // max(1, len(claimable)))
    where, params = _among(backends)
    return [
        QueueCandidates(_picks(probe, where, [queue, *params], share, room), room)
        for queue, room in claimable
    ]


def _among(backends: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """Return the part of ``PICK`` that restricts it to backends, with its parameters."""
    if backends is None:
        return "", ()
    return f" AND backend IN ({', '.join(['%s'] * len(backends))})", backends


def _claimable(tx: Transaction, queues: Sequence[str], limit: int) -> list[tuple[str, int]]:
    """Return in the order given the queues that have ready jobs and room, with that room."""
    if not queues:
        return []
    rows = tx.ids(CLAIMABLE, queues)
    if tx.dialect.lock_rows and any(left is not None for _, left in rows):
        # In two statements: the counters must be read after the wait for the lock.
        tx.ids(HOLD_LIMITED.format(lock=tx.dialect.lock_rows), queues)
        rows = tx.ids(CLAIMABLE, queues)
    alias = tx.connection.alias
    _unlimited.update((alias, name) for name, left in rows if left is None)
    _unlimited.difference_update((alias, name) for name, left in rows if left is not None)
    # What this very transaction has settled is not in the table yet, but its room is there.
    room = {
        name: limit if left is None else min(limit, left - tx.pending(name, State.RUNNING))
        for name, left in rows
    }
    return [(name, room[name]) for name in dict.fromkeys(queues) if room.get(name, 0) > 0]


def _picks(
    probe: _Probe, condition: str, params: Sequence[Any], share: int, room: int
) -> Iterator[Pick]:
    """Yield the first ready jobs of a queue in the order of their ranks, asking when asked."""
    seen: set[int] = set()
    # A fair share first, then all that there is room for, then the jobs that are no suspects: many
    # suspects in a row must not hide the jobs behind them.
    innocent = f"{condition} AND losses < {SUSPECT_LOSSES}"
    for where, wanted in ((condition, min(share, room)), (condition, room), (innocent, 2 * room)):
        if wanted <= len(seen):
            continue
        found = probe(where, [*params, wanted])
        for pick in found:
            if pick[0] not in seen:
                seen.add(pick[0])
                yield pick
        if len(found) < wanted:
            return


def _probe(tx: Transaction, columns: str, condition: str, params: Sequence[Any]) -> list[Pick]:
    return tx.fetch(_pick(columns, condition, tx.dialect.skip_locked), params)


@lru_cache(maxsize=64)
def _pick(columns: str, condition: str, lock: str) -> str:
    return PICK.format(columns=columns, condition=condition, lock=lock)
