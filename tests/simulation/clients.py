"""Producers, who enqueue and sometimes think better of it, and operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from relay_queue import store
from relay_queue.backoff import Backoff
from relay_queue.exceptions import QueueFull
from relay_queue.states import State
from tests.simulation.world import Actor, Outcome, RolledBack

QUEUES = ("open", "open", "tight")
"""Where jobs go: one of three to the queue with limits."""

KEYS = 3
"""Few, so that they meet."""


@dataclass
class Producer(Actor):
    """A client that enqueues: one job or a batch, alone or inside a transaction of its own."""

    count: int = 0

    def step(self) -> None:
        """Enqueue something, or let it be when the world has enough."""
        dice = self.world.dice
        calls = [self._call() for _ in range(dice.choice((1, 1, 1, 1, 2, 3)))]
        regret, joined = dice.random() < 0.15, dice.random() < 0.3
        asked = [(self._invoke(job, facts), job) for job, facts in calls]
        jobs = [job for _, job in asked]

        def body(tx: store.Transaction) -> list[store.Enqueued]:
            answers = (
                [store.enqueue(tx, jobs[0])] if len(jobs) == 1 else store.enqueue_many(tx, jobs)
            )
            if regret:
                raise RolledBack
            return answers

        labels = [facts["label"] for _, facts in calls]
        try:
            told = self.world.transact(self, body, labels=labels, joined=joined)
        except QueueFull:
            told = Outcome("nothing")
        for place, (op, _) in enumerate(asked):
            facts = {"job": told.value[place].job_id} if told.fate == "ok" else {}
            self.world.note("enqueue", told.fate, op=op, **facts)

    def _call(self) -> tuple[store.NewJob, dict[str, Any]]:
        """Return a job and what the client writes down of it."""
        dice = self.world.dice
        self.count += 1
        label, key, queue = f"{self.name}.{self.count}", None, dice.choice(QUEUES)
        if dice.random() < 0.15:
            key = label = f"key.{dice.randrange(KEYS)}"
            queue = "open"
        limit = dice.choice((1, 2, 2, 3, 5))
        delay = dice.choice((0, 0, 0, 0, 3, 40))
        due = self.world.now + self.skew + timedelta(seconds=delay)
        job = store.new_job(
            task="tests.tasks.anything",
            kwargs={"label": label},
            queue=queue,
            idempotency_key=key,
            priority=dice.choice((0, 0, 1)),
            max_attempts=limit,
            lease_seconds=dice.choice((5.0, 20.0)),
            run_after=due if delay else None,
            backoff=Backoff(1.0, 8.0, dice.choice(("none", "full"))),
        )
        facts: dict[str, Any] = {"label": label, "queue": queue}
        if key is None:  # the call that made the job may have been another's
            facts |= {"limit": limit, "due": due.isoformat() if delay else None}
        return job, facts

    def _invoke(self, job: store.NewJob, facts: dict[str, Any]) -> str:
        op = self.world.operation(self)
        self.world.note("enqueue", "invoke", op=op, **facts)
        return op


FITTING = {
    "cancel": ("scheduled", "ready", "running", "retrying"),
    "requeue": ("dead", "cancelled"),
    "run_now": ("scheduled", "retrying"),
    "release_leases": ("running",),
    "discard": ("dead",),
}
"""What an operator may do to jobs, and in which states it has an effect."""


@dataclass
class Operator(Actor):
    """Somebody at the console, who acts on any jobs."""

    ACTS: ClassVar[tuple[str, ...]] = (*("cancel", "requeue") * 2, *FITTING)

    def step(self) -> None:
        """Act on one to three jobs, on a queue, or prune."""
        dice = self.world.dice
        what = dice.random()
        if what < 0.75:
            verb = dice.choice(self.ACTS)
            self.act(verb, [self._some_job(verb) for _ in range(dice.choice((1, 1, 3)))])
        elif what < 0.9:
            self.on_queue(dice.choice(("pause", "resume", "resume")), dice.choice(QUEUES))
        else:
            self.prune(State(dice.choice(("succeeded", "dead", "cancelled"))))

    def _some_job(self, verb: str) -> int:
        """Return a job that the verb fits, as far as the operator saw; or any job."""
        fitting = self.world.jobs_in(FITTING[verb])
        if fitting and self.world.chance(0.7):
            return self.world.dice.choice(fitting)
        return self.world.dice.randint(1, self.world.newest_job() + 1)

    def act(self, verb: str, jobs: list[int]) -> None:
        """Do something to jobs, and write down what was answered."""
        jobs = sorted(set(jobs))
        op = self._invoke(verb, jobs)
        try:
            told = self.world.transact(self, lambda tx: getattr(store, verb)(tx, jobs))
        except QueueFull:
            told = Outcome("nothing")
        done = {"jobs": told.value.job_ids} if told.fate == "ok" else {}
        self.world.note("operate", told.fate, op=op, **done)

    def on_queue(self, verb: str, queue: str) -> None:
        """Stop or allow claims from a queue."""
        op = self._invoke(verb, [])
        told = self.world.transact(self, lambda tx: getattr(store, verb)(tx, queue))
        self.world.note("operate", told.fate, op=op)

    def prune(self, state: State) -> None:
        """Delete what ended some time ago."""
        op, age = self._invoke("prune", None), timedelta(seconds=self.world.dice.choice((1, 30)))
        told = self.world.transact(self, lambda tx: store.prune(tx, state, tx.now - age))
        self.world.note("operate", told.fate, op=op)

    def _invoke(self, verb: str, jobs: list[int] | None) -> str:
        op = self.world.operation(self)
        self.world.note("operate", "invoke", op=op, verb=verb, jobs=jobs)
        return op
