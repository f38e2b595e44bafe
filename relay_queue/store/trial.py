"""Trial: find out whether a row is at fault, or the table, a right, a sequence, a trigger around it.

A step over many rows that fails is done again row by row. What fails then may be an altered row.
But a fault of the tables makes sound rows fail, too, and their jobs must never go dead. A job whose
row is proven to be at fault goes dead, and nothing else of the row is read. A flipped bit must cost
one job, and not the worker that claims it or the jobs behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from django.db import DatabaseError

from relay_queue import payload as payload_codec
from relay_queue.backoff import Backoff
from relay_queue.states import CAN_GO_DEAD, ROW_ALTERED, State, sql_list
from relay_queue.store.enqueue import INSERT_JOB, build_job, insert_one
from relay_queue.store.queues import QueueLimits
from relay_queue.store.records import JobOptions
from relay_queue.store.transaction import Transaction, transaction
from relay_queue.store.transitions import moved, note_death

UNREADABLE: Final = (DatabaseError, ValueError, TypeError, ArithmeticError)
"""What reading an altered row may raise: for text that cannot be decoded, a date that is none, a
number that is text, or a constraint that the row breaks when it is written."""

FIND_STATE = f"""
    SELECT queue, state FROM relay_queue_job WHERE id = %s AND state IN ({sql_list(CAN_GO_DEAD)})
"""
"""Read where a job stands, and nothing else of it: only these two states lead to dead."""

MARK_DEAD = """
    UPDATE relay_queue_job SET state = 'dead', finished_at = %s, last_error = %s
    WHERE id = %s AND state = %s
"""
"""Send a job to the dead letters, without reading anything else of its row."""

END_LEASE_AS_LOST = """
    UPDATE relay_queue_lease SET ended_at = %s, outcome = 'lost'
    WHERE job_id = %s AND ended_at IS NULL
"""
"""End its lease as lost: the effect of its attempt is unknown."""

JOB_OF_LEASE = "SELECT job_id FROM relay_queue_lease WHERE id = %s AND token = %s"
"""Find the job of a lease."""

Item = TypeVar("Item")

Result = TypeVar("Result")

UNLIMITED: Final = QueueLimits(None, None, None, paused=False, unfinished=0)

ALTERED: Final = "ChecksumMismatch: the stored job is not the one that was enqueued; it was not run"

READ_SIGNED = """
    SELECT queue, backend, task, payload, checksum, idempotency_key
    FROM relay_queue_job WHERE id = %s
"""
"""Read what the checksum of one job is made of, and the checksum."""


def queue_of(tx: Transaction, job_id: int) -> str | None:
    """Return the queue of a ready or running job; None if there is no such job any more."""
    rows = tx.fetch(FIND_STATE, [job_id])
    return str(rows[0][0]) if rows else None


def job_of_lease(tx: Transaction, lease_id: int, token: str) -> int | None:
    """Return the id of a lease's job, or None if no lease has this id and token."""
    rows = tx.fetch(JOB_OF_LEASE, [lease_id, token])
    return int(rows[0][0]) if rows else None


def mark_unreadable(tx: Transaction, job_id: int, error: Exception) -> bool:
    """Make a ready or running job a dead letter because its row cannot be read; say whether it was.

    The caller must have proven that the row is at fault, as `Trial` does.
    """
    rows = tx.fetch(FIND_STATE, [job_id])
    for queue, state in rows:
        message = f"Unreadable: the row of this job was altered ({type(error).__name__})"
        tx.execute(END_LEASE_AS_LOST, [tx.now_db, job_id])
        # Nothing keeps others from the row in between: an operator may have cancelled the job.
        if tx.execute(MARK_DEAD, [tx.now_db, message, job_id, state]):
            moved(tx, [(job_id, queue)], state, State.DEAD)
            note_death(tx, job_id, ROW_ALTERED, message)
            return True
    return False


@dataclass(frozen=True, slots=True)
class TrialStep(Generic[Item, Result]):
    """What is done with each of some rows.

    ``run`` does it with one and returns what came of it: records with a ``queue``, or nothing if
    there was nothing to do. ``job_of`` names the job of a row. ``control`` does the same with sound
    jobs of a queue, in each way that the row could go, and says whether it could. ``goes_to`` tells
    the state that the row's job would go to. ``blame`` is called for a row that is proven to be at
    fault, and its records count as results. By default the job of that row goes dead.
    """

    name: str
    run: Callable[[Transaction, Item], Sequence[Result]]
    job_of: Callable[[Item], int | None]
    control: Callable[[Transaction, str, Item], object]
    goes_to: Callable[[Transaction, Item], str | None]
    blame: Callable[[Transaction, Item, Exception], Sequence[Result]] | None = None


Proof = tuple[str, str, str]
"""A step, a queue, and a state in it to which the step has really taken a job."""


class Trial:
    """Does steps row by row, in savepoints, and makes a job dead only if its row is proven to be at
    fault.

    A row is at fault if it fails alone, a sound row of its queue goes the same way, and it fails
    once more. The sound row is made for it and undone. Where a role may not insert jobs, it is
    another job that this step has taken to the same state in this trial. What fails without that
    proof is left as it is. ``faults`` has the last error of each step that was left undone so.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}
        self._proofs: set[Proof] = set()

    def each(
        self,
        tx: Transaction,
        step: TrialStep[Item, Result],
        items: Iterable[Item],
        *,
        enough: int = sys.maxsize,
    ) -> list[Result]:
        """Do a step with each item; return what came of those that passed, or are to blame.

        Ends early with ``enough`` results. Raises a database error that has another cause than rows
        or tables, like a full disk.
        """
        results: list[Result] = []
        suspects: list[tuple[Item, Exception]] = []
        for item in items:
            if len(results) >= enough:
                break
            try:
                results += self._alone(step, item)
            except UNREADABLE as error:
                if self._may_be_data(tx, step.name, error):
                    suspects.append((item, error))
        for item, fault in suspects:
            job_id = step.job_of(item)
            queue = None if job_id is None else queue_of(tx, job_id)
            if queue is not None and self._works_for_others(tx, step, item, queue):
                results += self._once_more(tx, step, item, keep=len(results) < enough)
            else:
                self.faults[step.name] = fault
        return results

    def spare(
        self, tx: Transaction, name: str, act: Callable[[Transaction], Result]
    ) -> Result | None:
        """Do something in a savepoint, and blame no row; return None if it cannot be done."""
        try:
            with transaction() as savepoint:
                return act(savepoint)
        except UNREADABLE as error:
            reraise_unless_harmless(tx, error)
            self.faults[name] = error
            return None

    def _alone(self, step: TrialStep[Item, Result], item: Item) -> Sequence[Result]:
        # A transaction inside another one is a savepoint with counters of its own.
        with transaction() as savepoint:
            results = step.run(savepoint, item)
            # A refused or repeated settlement has an answer too, and has written nothing to the job.
            gained = savepoint.gained() if results else set()
        self._proofs.update((step.name, queue, state) for queue, state in gained)
        return results

    def _works_for_others(
        self, tx: Transaction, step: TrialStep[Item, Result], item: Item, queue: str
    ) -> bool:
        """Say whether a step works for jobs that are sound, in the way that an item would go."""
        try:
            return passes(tx, lambda savepoint: step.control(savepoint, queue, item))
        except NoSoundJob:
            to = _goes_to(tx, step, item)
            same = {
                state for name, other, state in self._proofs if (name, other) == (step.name, queue)
            }
            return bool(same) if to is None else to in same

    def _once_more(
        self, tx: Transaction, step: TrialStep[Item, Result], item: Item, *, keep: bool
    ) -> Sequence[Result]:
        try:
            if keep:
                return self._alone(step, item)
            return _undone(lambda savepoint: step.run(savepoint, item))
        except UNREADABLE as error:
            if not self._may_be_data(tx, step.name, error):
                return []
            fault = error

        def blame(savepoint: Transaction) -> Sequence[Result]:
            if step.blame is not None:
                return step.blame(savepoint, item, fault)
            job_id = step.job_of(item)
            if job_id is not None:
                mark_unreadable(savepoint, job_id, fault)
            return []

        return self.spare(tx, step.name, blame) or []

    def _may_be_data(self, tx: Transaction, name: str, error: Exception) -> bool:
        reraise_unless_harmless(tx, error)
        if isinstance(error, DatabaseError) and tx.dialect.diagnose(error) == "tables":
            self.faults[name] = error
            return False
        return True


def reraise_unless_harmless(tx: Transaction, error: Exception) -> None:
    """Raise a database error again after which the transaction cannot go on: a full disk, a lost server."""
    if isinstance(error, DatabaseError) and tx.dialect.diagnose(error) not in ("data", "tables"):
        raise error


class NoSoundJob(Exception):
    """No sound job can be made to try a step with, as where a role may not insert jobs."""


def sound_job(tx: Transaction, queue: str, max_attempts: int = 1) -> int:
    """Insert a ready job that is as it should be, and return its id. Only for savepoints that are
    undone.

    Raises `NoSoundJob`, or a database error that has another cause than rows or tables.
    """
    options = JobOptions(queue, "default", "sound", 0, None, max_attempts, 60.0, None, Backoff())
    try:
        inserted = insert_one(tx, build_job(options), UNLIMITED, INSERT_JOB)
    except UNREADABLE as error:
        reraise_unless_harmless(tx, error)
        raise NoSoundJob from error
    assert inserted is not None, "no guard and no key can keep it out"
    return inserted.job_id


class _Undone(Exception):
    """Ends a savepoint whose changes must not stay."""


def passes(tx: Transaction, control: Callable[[Transaction], object]) -> bool:
    """Say whether sound jobs pass a step; nothing of it stays.

    Raises `NoSoundJob`, or a database error that has another cause than rows or tables.
    """

    def run(savepoint: Transaction) -> None:
        passed.append(bool(control(savepoint)))

    passed: list[bool] = []
    try:
        _undone(run)
    except UNREADABLE as error:
        reraise_unless_harmless(tx, error)
        return False
    return all(passed)


def _goes_to(tx: Transaction, step: TrialStep[Item, Result], item: Item) -> str | None:
    """Return the state that an item's job would go to, or None if its row cannot be read."""
    try:
        with transaction() as savepoint:
            return step.goes_to(savepoint, item)
    except UNREADABLE as error:
        reraise_unless_harmless(tx, error)
        return None


def _undone(act: Callable[[Transaction], Any]) -> Sequence[Any]:
    """Do something and undo it, to see whether it can be done."""
    with suppress(_Undone), transaction() as savepoint:
        act(savepoint)
        savepoint.flush()
        raise _Undone
    return []


class NoChecksumFits(ValueError):
    """Checksums fail for a reason that is not in the rows: the columns may have another type now."""


def fits(signed: Sequence[Any]) -> bool:
    """Say whether the columns of ``READ_SIGNED`` are those of a job as it was enqueued."""
    queue, backend, task, payload, checksum, key = signed
    return bool(payload_codec.checksum(queue, backend, task, payload, key) == checksum)


def require_sound(tx: Transaction, queue: str) -> None:
    """Make sure, before jobs go dead by their checksums, that the checksum of a new job fits.

    A change of a column's type may alter what is read of every job. Raises `NoChecksumFits`.
    """

    def fit(where: Transaction) -> bool:
        return fits(where.fetch(READ_SIGNED, [sound_job(where, queue)])[0])

    try:
        sound = passes(tx, fit)
    except NoSoundJob:
        sound = False
    if not sound:
        raise NoChecksumFits(
            "checksums of jobs do not fit, and that of a new job either does not or could not be "
            "tried: was the type of a column of relay_queue_job changed?"
        )
