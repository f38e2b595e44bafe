"""Report says how queues stand, and how often a job can have run."""

from datetime import timedelta

import pytest

from relay_queue import store
from relay_queue.exceptions import JobNotFound
from relay_queue.models import Lease
from relay_queue.query import ledger, status
from relay_queue.states import Outcome
from relay_queue.verdict import Verdict
from tests.store import actions


def leases(*outcomes: str | None) -> list[Lease]:
    return [
        Lease(id=n, attempt=n, outcome=outcome and Outcome(outcome))
        for n, outcome in enumerate(outcomes, start=1)
    ]


def test_detail_names_the_attempts_behind_the_verdict() -> None:
    assert ledger.explain_verdict(leases("lost", "acked")) == (
        "attempts that answered: 2; attempts cut short: 1 (lost)"
    )
    assert ledger.explain_verdict(leases("failed", None)) == (
        "attempts that answered: 1; attempt 2 is under way"
    )
    assert ledger.explain_verdict([]) == "it was never leased"


def test_detail_names_the_late_word_that_is_an_answer() -> None:
    late = Lease(id=1, attempt=1, outcome=Outcome.EXPIRED, refused_verb="ack")
    assert ledger.explain_verdict([late]) == "attempts that answered: 1 (expired, late ack)"


def test_story_has_the_leases_in_order_with_their_workers(engine: str) -> None:
    job_id = actions.enqueue()
    actions.nack(actions.claim_one(worker_id=actions.register(name="alpha")), delay_seconds=0.0)
    actions.do(store.promote)
    actions.ack(actions.claim_one())
    story = ledger.story(job_id)
    assert [lease.outcome for lease in story.leases] == ["failed", "acked"]
    assert story.leases[0].worker is not None
    assert story.leases[0].worker.name == "alpha"
    assert story.verdict == Verdict.RAN_AGAIN


def test_story_outlives_the_row_of_its_worker(engine: str) -> None:
    job_id = actions.enqueue()
    worker_id = actions.register()
    actions.ack(actions.claim_one(worker_id=worker_id))
    actions.do(store.stop_workers, [worker_id], "done")
    actions.do(store.prune_workers, actions.after(10**9), 10)
    (lease,) = ledger.story(job_id).leases
    assert (lease.worker_id, lease.worker) == (worker_id, None)


def test_story_of_no_job_is_an_error(engine: str) -> None:
    with pytest.raises(JobNotFound):
        ledger.story(404)


def test_status_counts_by_state_and_finds_the_oldest_wait(wall: actions.Wall) -> None:
    actions.enqueue(priority=-50)
    wall.advance(100)
    actions.enqueue(priority=50)
    actions.enqueue(run_after=actions.after(500))
    wall.advance(20)
    found = status.read_status()
    (queue,) = found.queues
    assert {state: n for state, n in queue.counts.items() if n} == {"ready": 2, "scheduled": 1}
    assert queue.oldest_wait_seconds == 120, "the oldest, though the other is next in line"
    assert queue.unfinished == 3
    assert found.next_due_at == actions.after(500)


def test_live_workers_come_first_and_old_stopped_ones_not_at_all(wall: actions.Wall) -> None:
    gone, stopped, live = (actions.register(name=name) for name in ("gone", "stopped", "live"))
    actions.do(store.stop_workers, [gone], "told to")
    wall.advance(2 * 86_400)
    actions.do(store.stop_workers, [stopped], "told to")
    actions.enqueue()
    actions.claim_one(worker_id=live)
    found = status.workers(wall())
    assert [(worker.row.name, worker.open_leases) for worker in found] == [
        ("live", 1),
        ("stopped", 0),
    ]
    assert found[0].heartbeat_age_seconds == timedelta(days=2).total_seconds()


def test_ledger_totals_count_every_lease(engine: str) -> None:
    actions.enqueue_each(3)
    first, second, _third = actions.claim(3)
    actions.ack(first)
    actions.cancel(second.job_id)
    actions.ack(second)
    totals = ledger.ledger_totals()
    assert totals.outcomes == {"acked": 1, "cancelled": 1, "open": 1}
    assert totals.refused == 1
