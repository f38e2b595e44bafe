"""End: close the leases that their owners tell of, and finish the jobs of those that were acked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from relay_queue.states import Outcome, State
from relay_queue.store.records import Settlement
from relay_queue.store.transaction import Transaction

END_LEASES = """
    WITH told (lease_id, token, outcome, error, traceback) AS ({rows})
    UPDATE relay_queue_lease
    SET ended_at = %s, outcome = told.outcome, error = told.error, traceback = told.traceback
    FROM told
    WHERE relay_queue_lease.id = told.lease_id AND relay_queue_lease.token = told.token
      AND relay_queue_lease.outcome IS NULL AND relay_queue_lease.expires_at > %s
    RETURNING relay_queue_lease.id, relay_queue_lease.job_id
"""
"""End the leases whose owners still hold them. An open lease has no outcome: asked for its end, a
planner may walk the index of all open leases instead of looking up these."""

SUCCEED = """
    WITH done (job_id, result) AS ({rows})
    UPDATE relay_queue_job
    SET state = 'succeeded', finished_at = %s, result = done.result, losses = 0, last_error = ''
    FROM done
    WHERE relay_queue_job.id = done.job_id AND relay_queue_job.state = 'running'
    RETURNING relay_queue_job.id, relay_queue_job.queue
"""
"""Finish the jobs whose leases were just ended as acked."""

END_AND_SUCCEED = """
    WITH told (lease_id, token, outcome, error, traceback, result) AS ({rows}),
    ended AS (
        UPDATE relay_queue_lease
        SET ended_at = %s, outcome = told.outcome, error = told.error, traceback = told.traceback
        FROM told
        WHERE relay_queue_lease.id = ANY(ARRAY(SELECT lease_id FROM told))
          AND relay_queue_lease.id = told.lease_id AND relay_queue_lease.token = told.token
          AND relay_queue_lease.outcome IS NULL AND relay_queue_lease.expires_at > %s
        RETURNING relay_queue_lease.id, job_id, told.outcome, told.result),
    acked (job_id, result) AS (SELECT * FROM unnest(
        ARRAY(SELECT job_id FROM ended WHERE outcome = 'acked'),
        ARRAY(SELECT result FROM ended WHERE outcome = 'acked'))),
    done AS (
        UPDATE relay_queue_job
        SET state = 'succeeded', finished_at = %s, result = acked.result, losses = 0, last_error = ''
        FROM acked
        WHERE relay_queue_job.id = ANY(ARRAY(SELECT job_id FROM acked))
          AND relay_queue_job.id = acked.job_id AND relay_queue_job.state = 'running'
        RETURNING relay_queue_job.id, relay_queue_job.queue)
    SELECT ended.id, ended.job_id, done.queue FROM ended LEFT JOIN done ON done.id = ended.job_id
"""
"""Both in one statement, with arrays for the reason of `Dialect.lookup`: of a table that it takes for empty
a planner expects that no lease is ended, and would walk over any index to find the job of none."""

ACK_CASTS = ("bigint", "text")
LEASE_CASTS = ("bigint", "text", "text", "text", "text")
CHAIN_CASTS = (*LEASE_CASTS, "text")

Ended = dict[int, tuple[int, str | None]]
"""By lease id: the job's id, and its queue if it has succeeded."""


def end(tx: Transaction, settlements: Sequence[Settlement]) -> Ended:
    """End the leases that may be ended, and finish the jobs of those that were acked.

    The settlements are of leases that are all different.
    """
    ended: Ended
    if tx.dialect.chains_writes:
        params = [value for told in settlements for value in (*_words(told), told.result)]
        rows = tx.rows(END_AND_SUCCEED, CHAIN_CASTS, params, *[tx.now_db] * 3)
        ended = {lease_id: (job_id, queue) for lease_id, job_id, queue in rows}
    else:
        params = [value for told in settlements for value in _words(told)]
        jobs = dict(tx.rows(END_LEASES, LEASE_CASTS, params, tx.now_db, tx.now_db))
        queues = _succeed(tx, settlements, jobs)
        ended = {lease_id: (job_id, queues.get(job_id)) for lease_id, job_id in jobs.items()}
    for queue, n in Counter(queue for _, queue in ended.values() if queue is not None).items():
        tx.move(queue, State.RUNNING, State.SUCCEEDED, n)
    return ended


def _words(told: Settlement) -> tuple[Any, ...]:
    return told.lease_id, told.token, outcome_of(told).value, told.error, told.traceback


def _succeed(
    tx: Transaction, settlements: Sequence[Settlement], jobs: dict[int, int]
) -> dict[int, str]:
    """Finish the jobs whose leases were ended as acked; return their queues by job id."""
    params: list[Any] = []
    for told in settlements:
        if told.verb == "ack" and told.lease_id in jobs:
            params += (jobs[told.lease_id], told.result)
    return dict(tx.rows(SUCCEED, ACK_CASTS, params, tx.now_db))


def outcome_of(told: Settlement) -> Outcome:
    """Return what a lease ends as when its owner tells this."""
    if told.verb == "ack":
        return Outcome.ACKED
    if told.verb == "snooze":
        return Outcome.SNOOZED
    if told.verb == "release":
        return Outcome.RELEASED
    if told.timed_out:
        return Outcome.TIMED_OUT
    return Outcome.FATAL if told.fatal else Outcome.FAILED
