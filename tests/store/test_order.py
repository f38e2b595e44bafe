"""The order of the deal: inside a queue by rank, across queues round the ring."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from relay_queue import store
from relay_queue.exceptions import InvalidJob, UnknownQueue
from relay_queue.models import Job, Queue
from tests.store.actions import (
    START,
    Wall,
    ack,
    after,
    claim,
    claim_one,
    claimed_ids,
    do,
    enqueue,
    enqueue_each,
    job,
    lose,
    nack,
    nothing_written,
    read,
    register,
    release,
    rows,
    snooze,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


def test_inside_one_priority_the_first_in_is_the_first_out(wall: Wall) -> None:
    ids = []
    for _ in range(10):
        ids.append(enqueue())
        wall.advance(0.000001)
    assert [claim_one().job_id for _ in ids] == ids


def test_jobs_of_the_same_microsecond_go_by_id_single_or_in_a_batch() -> None:
    ids = enqueue_each(3)
    ids += [a.job_id for a in do(store.enqueue_many, [job() for _ in range(20)])]
    ids += enqueue_each(2)
    assert claimed_ids(50) == ids


def test_a_higher_priority_goes_first() -> None:
    ids = {priority: enqueue(priority=priority) for priority in (-100, -1, 0, 1, 2, 100)}
    assert claimed_ids(6) == [ids[p] for p in sorted(ids, reverse=True)]


@pytest.mark.parametrize("aging", [60.0, 0.5, 3600.0])
def test_a_job_ages_one_class_per_aging_seconds(aging: float, wall: Wall) -> None:
    store.rerank("default", aging)
    low = enqueue(priority=0)
    wall.advance(aging - 0.000001)
    in_time = enqueue(priority=1)
    wall.advance(0.000002)
    too_late = enqueue(priority=1)
    assert claimed_ids(3) == [in_time, low, too_late]


def test_at_exactly_one_class_of_waiting_the_older_job_goes_first(wall: Wall) -> None:
    low = enqueue(priority=0)
    wall.advance(60)
    enqueue(priority=1)
    assert claim_one().job_id == low


def test_under_aging_every_job_is_eventually_first(wall: Wall) -> None:
    lowest = enqueue(priority=-100)
    wall.advance(200 * 60 + 1)
    enqueue(priority=100)
    assert claim_one().job_id == lowest


def test_under_strict_priority_no_waiting_helps(wall: Wall) -> None:
    store.rerank("default", None)
    low = enqueue(priority=-1)
    wall.advance(10 * 365 * 86_400)
    high = enqueue(priority=0)
    assert claimed_ids(2) == [high, low]


def test_strict_priority_is_first_in_first_out_inside_a_class(wall: Wall) -> None:
    store.rerank("default", None)
    jobs = []
    for n in range(12):
        jobs.append((-(n % 3), n, enqueue(priority=n % 3)))
        wall.advance(1)
    assert claimed_ids(12) == [job_id for _, _, job_id in sorted(jobs)]


def test_a_retry_rejoins_at_the_time_it_became_available(wall: Wall) -> None:
    failed = enqueue()
    nack(claim_one(), delay_seconds=10)
    wall.advance(9)
    earlier = enqueue()
    wall.advance(2)
    later = enqueue()
    do(store.promote)
    assert claimed_ids(3) == [earlier, failed, later]


def test_a_snoozed_job_rejoins_at_the_time_it_became_available(wall: Wall) -> None:
    snoozed = enqueue()
    snooze(claim_one(), 10)
    earlier = enqueue()
    wall.advance(11)
    later = enqueue()
    do(store.promote)
    assert claimed_ids(3) == [earlier, snoozed, later]


def test_a_job_that_was_scheduled_counts_its_waiting_from_when_it_was_due(wall: Wall) -> None:
    scheduled = enqueue(run_after=after(100))
    wall.advance(50)
    waiting = enqueue()
    wall.advance(51)
    newcomer = enqueue()
    do(store.promote)
    assert claimed_ids(3) == [waiting, scheduled, newcomer]


def test_a_million_future_jobs_do_not_stand_in_the_way() -> None:
    do(store.enqueue_many, [job(run_after=after(60 + n), priority=100) for n in range(100)])
    ready = enqueue(priority=-100)
    assert claimed_ids(5) == [ready]


def test_random_jobs_come_in_the_order_of_a_plain_sort(wall: Wall) -> None:
    rng = random.Random(7)
    jobs = []
    for _ in range(60):
        priority = rng.randint(-5, 5)
        job_id = enqueue(priority=priority)
        jobs.append((wall.now - START - timedelta(seconds=60 * priority), job_id))
        wall.advance(rng.choice([0, 0.000001, 7, 60, 200]))
    assert claimed_ids(60) == [job_id for _, job_id in sorted(jobs)]


# --- the ring ----------------------------------------------------------------------------------


def test_places_are_dealt_one_at_a_time_round_the_queues_in_the_order_given() -> None:
    a, b, c = (enqueue_each(3, queue=q) for q in "abc")
    assert claimed_ids(9, *"bca") == [b[0], c[0], a[0], b[1], c[1], a[1], b[2], c[2], a[2]]


def test_the_deal_begins_with_the_first_queue_given_so_the_caller_keeps_the_pointer() -> None:
    ids = {q: enqueue_each(2, queue=q) for q in "abc"}
    assert claimed_ids(2, *"abc") == [ids["a"][0], ids["b"][0]]
    assert claimed_ids(2, *"cab") == [ids["c"][0], ids["a"][1]]


def test_a_short_queue_leaves_its_places_to_the_others() -> None:
    a = enqueue_each(5, queue="a")
    b = enqueue_each(1, queue="b")
    assert claimed_ids(5, "a", "b") == [a[0], b[0], a[1], a[2], a[3]]


def test_priorities_of_different_queues_are_not_compared() -> None:
    low = enqueue(queue="a", priority=-100)
    high = enqueue_each(2, queue="b", priority=100)
    assert claimed_ids(2, "a", "b") == [low, high[0]]


def test_leases_are_granted_in_the_order_of_the_deal() -> None:
    for q in "ab":
        enqueue_each(3, queue=q)
    leases = [c.lease_id for c in claim(6, "b", "a")]
    assert leases == sorted(leases)


def test_queues_that_were_not_given_are_not_served() -> None:
    enqueue(queue="a")
    assert claim(5, "b") == []


# --- paused and limited queues -----------------------------------------------------------------


def test_a_paused_queue_is_skipped_until_it_is_resumed(wall: Wall) -> None:
    paused = enqueue(queue="a")
    other = enqueue(queue="b")
    do(store.pause, "a")
    assert claimed_ids(5, "a", "b") == [other]
    assert state(enqueue(queue="a")) == "ready", "a paused queue admits jobs"
    do(store.resume, "a")
    assert claimed_ids(1, "a") == [paused]


def test_what_runs_goes_on_when_its_queue_is_paused(wall: Wall) -> None:
    enqueue()
    held = claim_one()
    do(store.pause, "default")
    assert do(store.renew, [(held.lease_id, held.token, 60.0)]) == {held.lease_id}
    assert ack(held).accepted


def test_a_paused_queue_still_wakes_and_recovers(wall: Wall) -> None:
    due = enqueue(run_after=after(5))
    running = enqueue()
    claim_one()
    do(store.pause, "default")
    wall.advance(60)
    do(store.promote)
    do(store.recover_expired)
    assert [state(due), state(running)] == ["ready", "ready"]


def test_a_queue_gives_no_more_leases_than_max_running_over_all_workers() -> None:
    do(store.set_limits, "default", capacity=None, max_running=3)
    ids = enqueue_each(9)
    assert claimed_ids(2) == ids[:2]
    (third,) = claim(5)
    assert claim(5) == []
    release(third)
    assert claimed_ids(5) == [third.job_id]


def test_max_running_zero_gives_nothing() -> None:
    do(store.set_limits, "default", capacity=None, max_running=0)
    enqueue()
    assert claim(5) == []


def test_a_lowered_max_running_takes_nothing_back() -> None:
    enqueue_each(4)
    held = claim(3)
    do(store.set_limits, "default", capacity=None, max_running=1)
    assert claim(5) == []
    assert all(ack(c).accepted for c in held)
    assert len(claim(5)) == 1


def test_two_claims_in_one_transaction_keep_max_running() -> None:
    do(store.set_limits, "default", capacity=None, max_running=1)
    enqueue_each(2)
    with store.transaction() as tx:
        first = store.claim(tx, worker_id=None, queues=["default"], limit=1)
        second = store.claim(tx, worker_id=None, queues=["default"], limit=1)
    assert (len(first), len(second)) == (1, 0)


def test_a_place_given_back_in_the_same_transaction_is_dealt_again() -> None:
    do(store.set_limits, "default", capacity=None, max_running=1)
    _, second = enqueue_each(2)
    held = claim_one()
    with store.transaction() as tx:
        store.ack(tx, held.lease_id, held.token)
        (next_one,) = store.claim(tx, worker_id=None, queues=["default"], limit=5)
    assert next_one.job_id == second


# --- suspects ----------------------------------------------------------------------------------


def suspects(count: int, wall: Wall, queue: str = "default") -> list[int]:
    """Make jobs that cost two owners in a row, ready again."""
    ids = enqueue_each(count, queue=queue, max_attempts=9)
    worker_id = register()
    for _ in range(2):
        assert len(claim(count, queue, worker_id=worker_id)) == count
        do(store.recover_dead, [worker_id])
    wall.advance(300)
    do(store.promote)
    assert {(read(i).state, read(i).losses) for i in ids} == {("ready", 2)}
    # Their back-off was drawn by chance; put them in a known order, ahead of every newcomer.
    for place, job_id in enumerate(ids):
        rows(Job).filter(pk=job_id).update(rank=place)
    return ids


def test_a_process_takes_at_most_one_suspect(wall: Wall) -> None:
    ids = suspects(3, wall)
    assert claimed_ids(9) == ids[:1]
    assert claimed_ids(9, suspects=0) == []
    assert claimed_ids(9, suspects=2) == ids[1:]


def test_a_job_that_cost_one_owner_is_not_yet_a_suspect(wall: Wall) -> None:
    job_id = enqueue(max_attempts=9)
    lose(job_id, 1, wall)
    assert not claim_one(suspects=0).suspect


def test_a_row_of_suspects_does_not_hide_the_innocent_jobs_behind(wall: Wall) -> None:
    ids = suspects(5, wall)
    innocent = enqueue_each(3)
    assert claimed_ids(3, suspects=0) == innocent
    assert claimed_ids(3) == ids[:1]


def test_a_suspect_keeps_its_place_among_the_others(wall: Wall) -> None:
    ids = suspects(3, wall)
    first, last = enqueue_each(2)
    rows(Job).filter(pk=first).update(rank=-1)
    assert claimed_ids(9) == [first, ids[0], last]


def test_suspects_do_not_widen_max_running(wall: Wall) -> None:
    suspects(3, wall)
    enqueue_each(5)
    do(store.set_limits, "default", capacity=None, max_running=2)
    assert len(claim(9)) == 2
    assert claim(9) == []


def test_one_suspect_over_all_queues_of_a_claim(wall: Wall) -> None:
    a = suspects(2, wall, "a")
    b = suspects(2, wall, "b")
    assert claimed_ids(9, "a", "b") == a[:1]
    assert claimed_ids(9, "a", "b") == a[1:]
    assert claimed_ids(9, "a", "b") == b[:1]


def test_a_skipped_suspect_takes_no_place_from_the_innocent_of_its_queue(wall: Wall) -> None:
    a = suspects(1, wall, "a")
    suspects(1, wall, "b")
    innocent = enqueue_each(3, queue="b")
    do(store.set_limits, "b", capacity=None, max_running=2)
    assert claimed_ids(9, "a", "b") == [a[0], *innocent[:2]]


# --- rerank ------------------------------------------------------------------------------------


def test_rerank_rewrites_the_order_of_what_waits(wall: Wall) -> None:
    low = enqueue(priority=0)
    wall.advance(61)
    high = enqueue(priority=1)
    assert store.rerank("default", None) == 2
    assert rows(Queue).get(pk="default").aging_seconds is None
    assert claimed_ids(2) == [high, low]


def test_rerank_covers_every_unfinished_state_and_no_other_queue(wall: Wall) -> None:
    enqueue(queue="other", priority=5)
    before = rows(Job).get().rank
    nack(claim_then("dead"), fatal=True)
    enqueue(run_after=after(999))
    nack(claim_then("retrying"), delay_seconds=999)
    held = claim_then("running")
    enqueue()
    assert store.rerank("default", 1.0) == 4
    assert rows(Job).get(queue="other").rank == before
    release(held)
    assert do(store.promote) == {}


def claim_then(_next: str) -> store.Claim:
    """Enqueue and claim a job that is about to be in the state named."""
    enqueue(priority=50)
    return claim_one()


def test_rerank_of_more_jobs_than_one_transaction_is_whole(wall: Wall) -> None:
    do(store.enqueue_many, [job(priority=n % 3) for n in range(2_500)])
    assert store.rerank("default", 5.0) == 2_500
    base = rows(Job).filter(priority=0).first()
    assert base is not None
    for priority in range(3):
        ranks = set(rows(Job).filter(priority=priority).values_list("rank", flat=True))
        assert ranks == {base.rank - priority * 5_000_000}


@pytest.mark.parametrize("aging", [0, -1, 0.0001, 1e12, float("inf"), float("nan"), "60", True])
def test_an_aging_out_of_bounds_is_refused_before_anything_is_written(aging: float) -> None:
    enqueue()
    with nothing_written(), pytest.raises(InvalidJob, match="aging_seconds"):
        store.rerank("default", aging)
    enqueue()


def test_rerank_of_an_unknown_queue_is_refused(settings: object) -> None:
    settings.RELAY = {**settings.RELAY, "QUEUES": ["mail"]}  # type: ignore[attr-defined]
    with nothing_written(), pytest.raises(UnknownQueue):
        store.rerank("gone", 5.0)


@pytest.mark.parametrize("aging", [None, 315_360_000.0, 0.001])
def test_the_extreme_ranks_fit_the_column(aging: float | None, wall: Wall) -> None:
    store.rerank("default", aging)
    far = wall.now + timedelta(days=3649)
    for priority in (-100, 100):
        enqueue(priority=priority)
        enqueue(priority=priority, run_after=far)
        do(store.enqueue_many, [job(priority=priority, run_after=far)])
    assert rows(Job).count() == 6
    for stored in rows(Job):
        assert -(2**63) <= stored.rank < 2**63
