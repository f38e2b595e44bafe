"""Bulk acts: noted, done batch by batch, ended once."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from relay_queue import store
from relay_queue.models import BulkAct
from tests.store.actions import START, Wall, after, do, enqueue, nothing_written, rolled_back, rows

pytestmark = pytest.mark.usefixtures("wall")


def begin(**changes: Any) -> int:
    values: dict[str, Any] = {
        "nonce": uuid.uuid4().hex,
        "act": "cancel",
        "priority": None,
        "listing": "relay_queue.job",
        "filters": "queue=mail",
        "time_zone": "UTC",
        "language": "en",
        "upper_id": 10,
        "matched": 4,
        "user_id": "7",
        "username": "ada",
        "site": "staff",
    }
    bulk_id = do(store.start_bulk, store.NewBulkAct(**{**values, **changes}))
    assert bulk_id is not None
    return bulk_id


def read(bulk_id: int) -> BulkAct:
    return rows(BulkAct).get(pk=bulk_id)


def test_what_is_wanted_is_noted_in_full() -> None:
    bulk = read(begin(priority=-5, matched=None))
    assert (bulk.act, bulk.priority, bulk.listing) == ("cancel", -5, "relay_queue.job")
    assert (bulk.filters, bulk.time_zone, bulk.language) == ("queue=mail", "UTC", "en")
    assert (bulk.upper_id, bulk.matched, bulk.user_id, bulk.username) == (10, None, "7", "ada")
    assert bulk.site == "staff"
    assert (bulk.position, bulk.changed, bulk.skipped, bulk.job_id) == (0, 0, 0, None)
    assert (bulk.created_at, bulk.cancelled_at, bulk.finished_at) == (START, None, None)


def test_nonce_is_good_for_one_act() -> None:
    new = store.NewBulkAct(
        "n", "cancel", None, "list", "", "UTC", "en", 1, None, "7", "ada", "admin"
    )
    first = do(store.start_bulk, new)
    assert do(store.start_bulk, new) is None
    assert [bulk.pk for bulk in rows(BulkAct)] == [first]


def test_job_that_does_it_is_noted() -> None:
    bulk_id, other = begin(), begin()
    do(store.give_bulk_to_job, bulk_id, 99)
    assert (read(bulk_id).job_id, read(other).job_id) == (99, None)


def test_turn_is_taken_once_from_where_the_act_stands() -> None:
    bulk_id = begin()
    assert do(store.take_bulk_turn, bulk_id, 0, 4)
    with nothing_written():
        assert not do(store.take_bulk_turn, bulk_id, 0, 6)
    assert do(store.take_bulk_turn, bulk_id, 4, 6)
    assert read(bulk_id).position == 6


def test_what_batches_did_adds_up() -> None:
    bulk_id = begin()
    store_of = {"changed": 3, "skipped": 1}
    do(store.count_bulk, bulk_id, **store_of)
    do(store.count_bulk, bulk_id, **store_of)
    assert (read(bulk_id).changed, read(bulk_id).skipped) == (6, 2)


def test_act_that_was_ended_by_hand_takes_no_turn_and_ends_once(wall: Wall) -> None:
    bulk_id = begin()
    wall.advance(5)
    assert do(store.cancel_bulk, bulk_id)
    with nothing_written():
        assert not do(store.take_bulk_turn, bulk_id, 0, 4)
        assert not do(store.cancel_bulk, bulk_id)
        assert not do(store.finish_bulk, bulk_id, "late")
    bulk = read(bulk_id)
    assert (bulk.cancelled_at, bulk.finished_at, bulk.stop_reason) == (after(5), after(5), "")


def test_act_that_is_through_ends_once_with_its_reason_bounded() -> None:
    bulk_id = begin()
    assert do(store.finish_bulk, bulk_id, "x" * 900)
    assert len(read(bulk_id).stop_reason) == 500
    with nothing_written():
        assert not do(store.finish_bulk, bulk_id)
        assert not do(store.cancel_bulk, bulk_id)


def test_turn_that_is_rolled_back_can_be_taken_again() -> None:
    bulk_id = begin()
    with rolled_back() as tx:
        assert store.take_bulk_turn(tx, bulk_id, 0, 4)
    assert do(store.take_bulk_turn, bulk_id, 0, 4)


def test_acts_that_ended_before_the_time_are_pruned_a_bite_at_a_time(wall: Wall) -> None:
    old = [begin() for _ in range(3)]
    for bulk_id in old:
        do(store.finish_bulk, bulk_id)
    running = begin()
    wall.advance(10)
    do(store.cancel_bulk, late := begin())
    assert do(store.prune_bulk_acts, after(10), 2) == 2
    assert do(store.prune_bulk_acts, after(10), 2) == 1
    assert do(store.prune_bulk_acts, after(10), 2) == 0
    assert [bulk.pk for bulk in rows(BulkAct).order_by("pk")] == [running, late]


def test_act_whose_job_is_gone_is_pruned_and_one_that_may_go_on_is_not(wall: Wall) -> None:
    abandoned, waiting, unknown = begin(), begin(), begin()
    do(store.give_bulk_to_job, abandoned, 99)
    do(store.give_bulk_to_job, waiting, enqueue())
    wall.advance(10)
    assert do(store.prune_bulk_acts, after(0)) == 0
    assert do(store.prune_bulk_acts, after(10)) == 1
    assert {bulk.pk for bulk in rows(BulkAct)} == {waiting, unknown}
