"""Trial: find out whether a row is at fault, or the table, a right, a sequence, a trigger around it.

A step over many rows that fails is done again row by row. What fails then may be an altered row; but a
fault of the tables makes healthy rows fail, too, and those must never be condemned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from django.db import DatabaseError

from relay_queue.backoff import Backoff
from relay_queue.store.condemn import UNREADABLE, condemn, queue_of
from relay_queue.store.enqueue import INSERT_JOB, insert_one
from relay_queue.store.prepare import call
from relay_queue.store.queues import QueueLimits
from relay_queue.store.records import Terms
from relay_queue.store.transaction import Transaction, transaction

Item = TypeVar("Item")
Result = TypeVar("Result")

UNLIMITED: Final = QueueLimits(None, None, None, paused=False, unfinished=0)


@dataclass(frozen=True, slots=True)
class Step(Generic[Item, Result]):
    """What is done with each of some rows.

    ``run`` does it with one and returns what came of it: records with a ``queue``, or nothing if
    there was nothing to do. ``job_of`` names the job of a row. ``control`` does the same with a sound
    job, ready under the id that it is given, and says whether it could. ``blame`` is called for a row
    that is proven to be at fault, and its records count as results; by default its job is condemned.
    """

    name: str
    run: Callable[[Transaction, Item], Sequence[Result]]
    job_of: Callable[[Item], int | None]
    control: Callable[[Transaction, int], object]
    blame: Callable[[Transaction, Item, Exception], Sequence[Result]] | None = None


class Trial:
    """Does steps row by row, in savepoints, and condemns only what is proven to be at fault.

    A row is at fault if it fails alone, a sound row of its queue passes the same step, and it fails
    once more. What fails without that proof is left as it is. ``faults`` has the last error of each
    step that was left undone so.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}

    def each(
        self,
        tx: Transaction,
        step: Step[Item, Result],
        items: Iterable[Item],
        *,
        enough: int = sys.maxsize,
    ) -> list[Result]:
        """Do a step with each item; return what came of those that passed, or are to blame.

        Ends early with ``enough`` results. Raises a database error whose cause is neither in rows nor
        in tables, like a full disk.
        """
        results: list[Result] = []
        suspects: list[tuple[Item, Exception]] = []
        for item in items:
            if len(results) >= enough:
                break
            try:
                results += _alone(step.run, item)
            except UNREADABLE as error:
                if self._may_be_data(tx, step.name, error):
                    suspects.append((item, error))
        sound: dict[str, bool] = {getattr(result, "queue", ""): True for result in results}
        for item, fault in suspects:
            job_id = step.job_of(item)
            queue = None if job_id is None else queue_of(tx, job_id)
            if queue is not None and queue not in sound:
                sound[queue] = passes(tx, queue, step.control)
            if queue is not None and sound[queue]:
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

    def _once_more(
        self, tx: Transaction, step: Step[Item, Result], item: Item, *, keep: bool
    ) -> Sequence[Result]:
        try:
            return _alone(step.run, item) if keep else _in_vain(step.run, item)
        except UNREADABLE as error:
            if not self._may_be_data(tx, step.name, error):
                return []
            fault = error

        def blame(savepoint: Transaction) -> Sequence[Result]:
            if step.blame is not None:
                return step.blame(savepoint, item, fault)
            job_id = step.job_of(item)
            if job_id is not None:
                condemn(savepoint, job_id, fault)
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


def sound_job(tx: Transaction, queue: str) -> int:
    """Insert a ready job that is as it should be, and return its id. Only for savepoints that are undone."""
    agreed = Terms(queue, "default", "sound", 0, None, 1, 60.0, None, Backoff())
    inserted = insert_one(tx, call(agreed), UNLIMITED, INSERT_JOB)
    assert inserted is not None, "no guard and no key can keep it out"
    return inserted.job_id


class _Undone(Exception):
    """Ends a savepoint whose changes must not stay."""


def passes(tx: Transaction, queue: str, control: Callable[[Transaction, int], object]) -> bool:
    """Say whether a sound job of a queue passes a step; nothing of it stays.

    Raises a database error whose cause is neither in rows nor in tables.
    """

    def run(savepoint: Transaction, _: None) -> list[None]:
        passed.append(bool(control(savepoint, sound_job(savepoint, queue))))
        return []

    passed: list[bool] = []
    try:
        _in_vain(run, None)
    except UNREADABLE as error:
        reraise_unless_harmless(tx, error)
        return False
    return all(passed)


def _alone(act: Callable[[Transaction, Any], Sequence[Result]], item: Any) -> Sequence[Result]:
    # A transaction inside another one is a savepoint with counters of its own.
    with transaction() as savepoint:
        return act(savepoint, item)


def _in_vain(act: Callable[[Transaction, Any], Sequence[Result]], item: Any) -> Sequence[Result]:
    """Do something to see whether it can be done, and undo it; nothing comes of it."""
    with suppress(_Undone), transaction() as savepoint:
        act(savepoint, item)
        savepoint.flush()
        raise _Undone
    return []
