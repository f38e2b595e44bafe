"""Random verbs by several owners, compared with the model of section 4 after every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from relay_queue import clock, store
from relay_queue.backoff import Backoff
from relay_queue.exceptions import IdempotencyConflict, QueueFull
from relay_queue.models import Job, Lease
from relay_queue.store import Settlement
from tests.store import actions
from tests.store.actions import do
from tests.store.model import (
    BACKOFF_BASE_SECONDS,
    BACKOFF_MAX_SECONDS,
    LEASE_SECONDS,
    Answer,
    Model,
    ModelJob,
    ModelQueue,
    Spec,
)

QUEUES: dict[str, Callable[[], ModelQueue]] = {
    "free": ModelQueue,
    "tight": lambda: ModelQueue(capacity=6, max_running=2, aging_seconds=None),
}
OWNERS = ("A", "B", "C")
REFUSALS = {"full": QueueFull, "conflict": IdempotencyConflict}

jobs = Bundle("jobs")
claims = Bundle("claims")

specs = st.builds(
    Spec,
    queue=st.sampled_from(["free", "free", "tight"]),
    call=st.integers(1, 2),
    key=st.sampled_from([None, None, None, None, "k1", "k2"]),
    priority=st.integers(-1, 2),
    max_attempts=st.sampled_from([1, 2, 3, 4, 6, 9]),
    delay_seconds=st.sampled_from([0, 0, 0, 0, 0, 5, 50]),
)
owners = st.sampled_from(OWNERS)
rings = st.permutations(list(QUEUES))
verbs = st.sampled_from(["ack", "nack", "nack", "fatal", "timed_out", "snooze", "release"])
delays = st.sampled_from([None, 0.0, 3.0, 90.0])
some_jobs = st.lists(jobs, min_size=1, max_size=3)


def new_job(spec: Spec) -> store.NewJob:
    later = clock.now() + timedelta(seconds=spec.delay_seconds)
    return actions.job(
        args=[spec.call],
        queue=spec.queue,
        idempotency_key=spec.key,
        priority=spec.priority,
        max_attempts=spec.max_attempts,
        run_after=later if spec.delay_seconds else None,
        lease_seconds=LEASE_SECONDS,
        backoff=Backoff(BACKOFF_BASE_SECONDS, BACKOFF_MAX_SECONDS),
    )


def settlement(verb: str, held: store.Claim, token: str, delay: float | None) -> Settlement:
    word: Any = "nack" if verb in ("fatal", "timed_out") else verb
    return Settlement(
        word,
        held.lease_id,
        token,
        fatal=verb == "fatal",
        timed_out=verb == "timed_out",
        delay_seconds=delay,
    )


class StoreMachine(RuleBasedStateMachine):
    """Each rule runs one verb on the store and on the model and compares the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.wall = actions.Wall()
        self.undo = ExitStack()
        self.undo.callback(actions.empty)
        self.undo.enter_context(clock.use(self.wall))
        self.model = Model({name: make() for name, make in QUEUES.items()}, self.wall.now)
        self._begin()

    def teardown(self) -> None:
        self.undo.close()

    def _begin(self) -> None:
        for name, queue in self.model.queues.items():
            do(store.set_limits, name, capacity=queue.capacity, max_running=queue.max_running)
            store.rerank(name, queue.aging_seconds)
        self.workers = {owner: actions.register() for owner in OWNERS}

    # --- enqueue -----------------------------------------------------------------------------

    @initialize(target=jobs, wanted=st.lists(specs, min_size=3, max_size=6))
    def begin_with_some(self, wanted: list[Spec]) -> Any:
        return self.enqueue(wanted, batch=True)

    @rule(target=jobs, wanted=st.lists(specs, min_size=1, max_size=4), batch=st.booleans())
    def enqueue(self, wanted: list[Spec], batch: bool) -> Any:
        if not batch:
            wanted = wanted[:1]
        refusals = self.model.refusals(wanted)
        if refusals:
            with pytest.raises(tuple(REFUSALS[reason] for reason in refusals)):
                self._enqueue(wanted, batch)
            return multiple()
        # PostgreSQL inserts a batch that has keys in their order, and ranks it in that of the calls.
        keyed = any(spec.key and self.model.holder(spec) is None for spec in wanted)
        ranked = batch and keyed and actions.connection().vendor == "postgresql"
        answers = self._enqueue(wanted, batch)
        for place, (spec, answer) in enumerate(zip(wanted, answers, strict=True)):
            held = self.model.holder(spec)
            assert answer.created == (held is None)
            if held is None:
                self.model.add(answer.job_id, spec, place if ranked else 0)
            else:
                assert answer.job_id == held.id
            assert answer.state == self.model.jobs[answer.job_id].state
        return multiple(*(answer.job_id for answer in answers))

    def _enqueue(self, wanted: list[Spec], batch: bool) -> list[store.Enqueued]:
        if batch:
            return do(store.enqueue_many, [new_job(spec) for spec in wanted])
        return [do(store.enqueue, new_job(spec)) for spec in wanted]

    # --- claim and settle --------------------------------------------------------------------

    @rule(
        target=claims,
        owner=owners,
        ring=rings,
        limit=st.integers(1, 5),
        suspects=st.integers(0, 1),
    )
    def claim(self, owner: str, ring: list[str], limit: int, suspects: int) -> Any:
        with store.transaction() as tx:
            return multiple(*self._claim(tx, owner, ring, limit, suspects))

    def _claim(
        self, tx: store.Transaction, owner: str, ring: list[str], limit: int, suspects: int
    ) -> list[store.Claim]:
        worker_id = self.workers[owner]
        dealt = self.model.deal(ring, limit, suspects)
        given = store.claim(tx, worker_id=worker_id, queues=ring, limit=limit, suspects=suspects)
        assert [held.job_id for held in given] == [job.id for job in dealt]
        for held, job in zip(given, dealt, strict=True):
            self.model.grant(job, held.lease_id, held.token, worker_id)
            assert (held.attempt, held.suspect) == (job.attempt, job.losses >= 2)
            assert held.attempts_left == job.max_attempts - job.used
        return given

    @rule(
        target=claims,
        owner=owners,
        ring=rings,
        words=st.lists(st.tuples(verbs, delays), min_size=1, max_size=4),
    )
    def work(self, owner: str, ring: list[str], words: list[tuple[str, float | None]]) -> Any:
        """Claim and settle at once, as a quick function does."""
        with store.transaction() as tx:
            given = self._claim(tx, owner, ring, len(words), 1)
        told = [(held, *word) for held, word in zip(given, words, strict=False)]
        with store.transaction() as tx:
            self._settle(tx, told)
        return multiple(*given)

    @rule(
        target=claims,
        owner=owners,
        ring=rings,
        limit=st.integers(1, 5),
        times=st.integers(1, 3),
    )
    def crash(self, owner: str, ring: list[str], limit: int, times: int) -> Any:
        """Claim and die, again and again, as workers do whose function takes them down."""
        given: list[store.Claim] = []
        for _ in range(times):
            with store.transaction() as tx:
                given += self._claim(tx, owner, ring, limit, 1)
            self.recover_dead(owner)
        self.advance(300.0, wake=True)
        return multiple(*given)

    @rule(told=st.lists(st.tuples(claims, verbs, delays), min_size=1, max_size=3))
    def settle(self, told: list[tuple[store.Claim, str, float | None]]) -> None:
        with store.transaction() as tx:
            self._settle(tx, told)

    def _settle(
        self, tx: store.Transaction, told: list[tuple[store.Claim, str, float | None]]
    ) -> None:
        words = [settlement(verb, held, held.token, delay) for held, verb, delay in told]
        answers = store.settle(tx, words)
        expected = [
            self.model.settle(verb, held.lease_id, held.token, delay) for held, verb, delay in told
        ]
        for answer, wanted in zip(answers, expected, strict=True):
            assert (answer.job_id, answer.accepted) == (wanted.job_id, wanted.accepted)
            assert not answer.accepted or answer.state == wanted.state

    @rule(held=claims, verb=verbs, delay=delays)
    def forge(self, held: store.Claim, verb: str, delay: float | None) -> None:
        token = "0" * len(held.token)
        (answer,) = actions.settle([settlement(verb, held, token, delay)])
        assert Answer(answer.job_id, answer.state, answer.accepted) == Answer(None, "", False)
        assert self.model.settle(verb, held.lease_id, token, delay) == Answer(None, "", False)

    @rule(held=claims, seconds=st.sampled_from([1.0, 60.0, 500.0]))
    def renew(self, held: store.Claim, seconds: float) -> None:
        renewed = do(store.renew, [(held.lease_id, held.token, seconds)])
        kept = self.model.renew(held.lease_id, held.token, seconds)
        assert renewed == ({held.lease_id} if kept else set())

    @rule(
        target=claims,
        owner=owners,
        ring=rings,
        told=st.lists(st.tuples(claims, verbs, delays), max_size=3),
        limit=st.integers(1, 5),
    )
    def tick(
        self,
        owner: str,
        ring: list[str],
        told: list[tuple[store.Claim, str, float | None]],
        limit: int,
    ) -> Any:
        """Settle, recover, promote and claim in one transaction, as a worker's loop does."""
        with store.transaction() as tx:
            self._settle(tx, told)
            self._compare_losses(store.recover_expired(tx), self.model.expire())
            assert store.promote(tx) == self.model.promote()
            return multiple(*self._claim(tx, owner, ring, limit, 1))

    # --- time --------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.000001, 1.0, 10.0, 61.0, 400.0, -30.0]), wake=st.booleans())
    def advance(self, seconds: float, wake: bool) -> None:
        self.model.now = self.wall.advance(seconds)
        if wake:
            self.promote()

    @rule()
    def recover_expired(self) -> None:
        self._compare_losses(do(store.recover_expired), self.model.expire())

    @rule(owner=owners)
    def recover_dead(self, owner: str) -> None:
        worker_id = self.workers[owner]
        recovered = do(store.recover_dead, [worker_id])
        self._compare_losses(recovered, self.model.bury(worker_id))

    def _compare_losses(self, recovered: list[store.Recovered], lost: list[ModelJob]) -> None:
        assert {(r.job_id, r.lease_id, r.outcome, r.state) for r in recovered} == {
            (job.id, job.leases[-1].id, job.leases[-1].outcome, job.state) for job in lost
        }
        for job in lost:
            if job.state == "retrying":
                # The delay is drawn by chance; what matters is its range, and that it is kept.
                job.available_at = actions.read(job.id).available_at
                assert 0 <= (job.available_at - self.model.now).total_seconds() <= 300

    @rule()
    def promote(self) -> None:
        assert do(store.promote) == self.model.promote()

    # --- operate -----------------------------------------------------------------------------

    VERBS: ClassVar[dict[str, Callable[..., store.Changed]]] = {
        "cancel": store.cancel,
        "discard": store.discard,
        "run_now": store.run_now,
        "release_leases": store.release_leases,
        "requeue": store.requeue,
    }

    @rule(name=st.sampled_from(list(VERBS)), ids=some_jobs)
    def operate(self, name: str, ids: list[int]) -> None:
        if name == "requeue" and not self.model.requeue_fits(ids):
            with pytest.raises(QueueFull):
                do(store.requeue, ids)
            return
        before = {i: self.model.jobs[i].state for i in ids if i in self.model.jobs}
        changed = do(self.VERBS[name], ids)
        expected = getattr(self.model, name)(ids)
        assert sorted(changed.job_ids) == sorted(expected)
        assert changed.skipped == {i: s for i, s in before.items() if i not in expected}

    @rule(count=st.integers(1, 3))
    def requeue_the_dead(self, count: int) -> None:
        dead = [job.id for job in self.model.jobs.values() if job.state == "dead"]
        self.operate("requeue", dead[:count])

    @rule(ids=some_jobs, priority=st.integers(-1, 2))
    def set_priority(self, ids: list[int], priority: int) -> None:
        changed = do(store.set_priority, ids, priority)
        assert sorted(changed.job_ids) == sorted(self.model.set_priority(ids, priority))

    @rule(queue=st.sampled_from(list(QUEUES)), paused=st.sampled_from([True, False, False]))
    def pause_or_resume(self, queue: str, paused: bool) -> None:
        do(store.pause if paused else store.resume, queue)
        self.model.queues[queue].paused = paused

    @rule(state=st.sampled_from(["succeeded", "dead", "cancelled"]), age=st.sampled_from([0, 60]))
    def prune(self, state: str, age: int) -> None:
        before = self.wall.now - timedelta(seconds=age)
        assert do(store.prune, state, before).jobs == len(self.model.prune(state, before))

    # --- what is rolled back never was -------------------------------------------------------

    @rule(
        owner=owners,
        ring=rings,
        wanted=specs,
        told=st.lists(st.tuples(claims, verbs, delays), max_size=3),
        ids=st.lists(jobs, max_size=3),
    )
    def roll_back(
        self,
        owner: str,
        ring: list[str],
        wanted: Spec,
        told: list[tuple[store.Claim, str, float | None]],
        ids: list[int],
    ) -> None:
        before = copy.deepcopy(self.model)
        with actions.rolled_back() as tx:
            self._settle(tx, told)
            self._compare_losses(store.recover_expired(tx), self.model.expire())
            if not self.model.refusals([wanted]):
                answer = store.enqueue(tx, new_job(wanted))
                if answer.created:
                    self.model.add(answer.job_id, wanted)
            self._claim(tx, owner, ring, 3, 1)
            store.cancel(tx, ids)
            self.model.cancel(ids)
        self.model = before

    # --- the comparison ----------------------------------------------------------------------

    @invariant()
    def jobs_are_what_the_model_says_in_the_order_of_their_ranks(self) -> None:
        # One look serves for both, since most of a run is looking.
        fields = (
            "rank",
            "id",
            "queue",
            "idempotency_key",
            "priority",
            "state",
            "attempt",
            "attempt_base",
            "max_attempts",
            "losses",
            "available_at",
            "finished_at",
        )
        stored = sorted(actions.rows(Job).values_list(*fields))
        assert sorted(row[1:] for row in stored) == sorted(
            (
                j.id,
                j.queue,
                j.key,
                j.priority,
                j.state,
                j.attempt,
                j.attempt_base,
                j.max_attempts,
                j.losses,
                j.available_at,
                j.finished_at,
            )
            for j in self.model.jobs.values()
        )
        for name in QUEUES:
            ready = [row[1] for row in stored if (row[2], row[5]) == (name, "ready")]
            assert ready == [job.id for job in self.model.order(name)]

    @invariant()
    def leases_are_what_the_model_says(self) -> None:
        stored = actions.rows(Lease).values_list(
            "id",
            "job_id",
            "token",
            "attempt",
            "worker_id",
            "expires_at",
            "outcome",
            "refused_verb",
            "ended_at",
        )
        assert sorted((row[:-1] for row in stored), key=lambda row: row[0]) == sorted(
            (
                (
                    x.id,
                    j.id,
                    x.token,
                    x.attempt,
                    x.worker_id,
                    x.expires_at,
                    x.outcome,
                    x.refused_verb,
                )
                for j in self.model.jobs.values()
                for x in j.leases
            ),
            key=lambda row: row[0],
        )
        still_open = [row for row in stored if row[-1] is None]
        assert len(still_open) == sum(1 for _ in self.model.open_leases())

    @invariant()
    def counters_are_exact(self) -> None:
        assert actions.counted() == self.model.counts()


BASE = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


@pytest.mark.timeout(600)  # a failure is shrunk to its shortest story, which takes minutes
@pytest.mark.usefixtures("engine")
def test_random_verbs_of_several_owners_obey_the_model_of_a_jobs_life() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(BASE, max_examples=40, stateful_step_count=40)
    )


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("engine")
def test_very_many_random_verbs_obey_the_model_of_a_jobs_life() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(BASE, max_examples=3000, stateful_step_count=80)
    )
