"""Who wakes the workers: the store's transaction, after the commit, if a verb has noted it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from unittest import mock

import pytest
from django.db import transaction

from relay_queue import conf, store
from relay_queue.models import Job
from tests.store.actions import (
    Wall,
    after,
    claim_one,
    do,
    enqueue,
    job,
    nack,
    register,
    rows,
)

pytestmark = pytest.mark.usefixtures("wall")


@pytest.fixture
def rings(wall: Wall) -> Iterator[mock.Mock]:
    """Return what is called in the place of a ring."""
    with mock.patch("relay_queue.wakeup.ring") as ring:
        yield ring


def dead() -> int:
    enqueue(max_attempts=1)
    held = claim_one()
    nack(held)
    return held.job_id


def running() -> int:
    enqueue()
    return claim_one().job_id


Verb = Callable[[store.Transaction], object]
Prepare = Callable[[Wall], Verb]

WAKING: dict[str, Prepare] = {
    "enqueue": lambda wall: lambda tx: store.enqueue(tx, job()),
    "enqueue for later": lambda wall: lambda tx: store.enqueue(tx, job(run_after=after(60))),
    "enqueue_many": lambda wall: lambda tx: store.enqueue_many(tx, [job(), job()]),
}


def waking(name: str) -> Callable[[Prepare], Prepare]:
    def add(prepare: Prepare) -> Prepare:
        WAKING[name] = prepare
        return prepare

    return add


@waking("cancel")
def _cancel(wall: Wall) -> Verb:
    job_id = running()
    return lambda tx: store.cancel(tx, [job_id])


@waking("requeue")
def _requeue(wall: Wall) -> Verb:
    job_id = dead()
    return lambda tx: store.requeue(tx, [job_id])


@waking("run_now")
def _run_now(wall: Wall) -> Verb:
    job_id = enqueue(run_after=after(60))
    return lambda tx: store.run_now(tx, [job_id])


@waking("release_leases")
def _release(wall: Wall) -> Verb:
    job_id = running()
    return lambda tx: store.release_leases(tx, [job_id])


@waking("pause")
def _pause(wall: Wall) -> Verb:
    return lambda tx: store.pause(tx, "default")


@waking("resume")
def _resume(wall: Wall) -> Verb:
    do(store.pause, "default")
    return lambda tx: store.resume(tx, "default")


@waking("set_limits")
def _set_limits(wall: Wall) -> Verb:
    return lambda tx: store.set_limits(tx, "default", capacity=3)


@waking("promote")
def _promote(wall: Wall) -> Verb:
    enqueue(run_after=after(60))
    wall.advance(61)
    return store.promote


@waking("recover_expired")
def _recover(wall: Wall) -> Verb:
    running()
    wall.advance(1_000)
    return store.recover_expired


@waking("recover_dead")
def _recover_dead(wall: Wall) -> Verb:
    enqueue()
    worker_id = register()
    claim_one(worker_id=worker_id)
    return lambda tx: store.recover_dead(tx, [worker_id])


@pytest.mark.parametrize("prepare", WAKING.values(), ids=WAKING)
def test_a_verb_that_makes_work_wakes_once_after_its_commit(
    prepare: Prepare, wall: Wall, rings: mock.Mock
) -> None:
    verb = prepare(wall)
    rings.reset_mock()
    with store.transaction() as tx:
        verb(tx)
        tx.wake()
        rings.assert_not_called()
    rings.assert_called_once_with(conf.get().database)


@pytest.mark.parametrize("prepare", WAKING.values(), ids=WAKING)
def test_a_verb_in_the_callers_transaction_wakes_when_that_commits(
    prepare: Prepare, wall: Wall, rings: mock.Mock
) -> None:
    verb = prepare(wall)
    rings.reset_mock()
    with transaction.atomic(using=conf.get().database):
        do(verb)
        rings.assert_not_called()
    rings.assert_called_once_with(conf.get().database)


@pytest.mark.parametrize("prepare", WAKING.values(), ids=WAKING)
def test_what_is_rolled_back_wakes_nobody(prepare: Prepare, wall: Wall, rings: mock.Mock) -> None:
    verb = prepare(wall)
    rings.reset_mock()
    with suppress(LookupError), store.transaction() as tx:
        verb(tx)
        raise LookupError
    with suppress(LookupError), transaction.atomic(using=conf.get().database):
        do(verb)
        raise LookupError
    with transaction.atomic(using=conf.get().database):
        with suppress(LookupError), transaction.atomic(using=conf.get().database):
            do(verb)
            raise LookupError
        with suppress(LookupError), store.transaction() as tx:
            verb(tx)
            raise LookupError
    rings.assert_not_called()


def test_what_changes_nothing_wakes_nobody(wall: Wall, rings: mock.Mock) -> None:
    done = dead()
    enqueue(idempotency_key="taken")
    do(store.pause, "default")
    rings.reset_mock()
    do(store.cancel, [done, 999])
    do(store.release_leases, [done])
    do(store.run_now, [done])
    do(store.requeue, [999])
    do(store.pause, "default")
    do(store.enqueue, job(idempotency_key="taken"))
    do(store.enqueue_many, [job(idempotency_key="taken")])
    do(store.promote)
    do(store.recover_expired)
    do(store.discard, [done])
    rings.assert_not_called()
    assert rows(Job).count() == 1


def test_a_transaction_that_is_told_so_leaves_the_ring_to_its_caller(rings: mock.Mock) -> None:
    with store.transaction(rings=False) as tx:
        store.enqueue(tx, job())
    assert tx.wakes
    rings.assert_not_called()
