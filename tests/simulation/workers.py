"""Workers, who do what a worker's tick does; recoverers; and owners who come back late."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from relay_queue import store
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker.plan import Done, Plan
from relay_queue.worker.tick import tick
from tests.history.journal import digest
from tests.history.ledger import label_of
from tests.history.witness import TABLE
from tests.simulation.scratch import ALIAS
from tests.simulation.world import Actor, Outcome, RolledBack, World

VERBS: tuple[Any, ...] = ("ack", "ack", "ack", "ack", "nack", "nack", "snooze", "release")
LAST_VERBS: tuple[Any, ...] = ("ack", "ack", "nack")
"""While everything drains nothing is put off any more."""
SLOTS = 3
RECENT = 8
"""Of how many of the newest leases somebody comes back late: of older ones nothing is open."""
LONG_PAUSE = (3, 6, 12)
"""Steps of the world that a stopped process sleeps through."""


def settlement(world: World, claim: Claim) -> Settlement:
    """Return what the owner of a claim tells."""
    dice = world.dice
    verb = dice.choice(VERBS if world.faults else LAST_VERBS)
    delay = {"snooze": dice.choice((1.0, 30.0)), "nack": dice.choice((None, None, 0.0))}
    return Settlement(
        verb,
        claim.lease_id,
        claim.token,
        result="null" if verb == "ack" else None,
        fatal=verb == "nack" and dice.random() < 0.15,
        timed_out=verb == "nack" and dice.random() < 0.15,
        delay_seconds=delay.get(verb),
    )


def tell(world: World, actor: Actor, job_id: int, told: Settlement) -> str:
    """Write down that something is told of a lease; return the name of the operation."""
    op = world.operation(actor)
    token = digest(told.token)
    facts = {"lease": told.lease_id, "token": token, "verb": told.verb, "job": job_id}
    world.note("settle", "told", op=op, **facts)
    return op


def answer(world: World, op: str, fate: str, settled: Any = None, **facts: Any) -> None:
    """Write down what was answered to it."""
    if fate == "ok":
        facts |= {"accepted": settled.accepted, "reason": settled.reason, "state": settled.state}
    world.note("settle", "answered" if fate == "ok" else fate, op=op, **facts)


def _held(claim: Claim) -> Any:
    """Return what a tick asks of a lease that is to be renewed."""
    return SimpleNamespace(claim=claim)


@dataclass
class Worker(Actor):
    """A worker process: registers, then ticks. It dies, sleeps and comes back as processes do."""

    worker_id: int | None = None
    incarnations: int = 0
    running: dict[int, Claim] = field(default_factory=dict)
    words: dict[int, tuple[Claim, Settlement]] = field(default_factory=dict)

    def step(self) -> None:
        """Begin to work, or do one tick's work."""
        if self.worker_id is None:
            self.begin()
        elif self.world.faults and not self.world.turns and self.world.chance(0.1):
            self.resting = self.world.dice.choice(LONG_PAUSE)
            self.world.note("fault", "pause", actor=self.name, steps=self.resting)
        elif self.running and self.world.chance(0.1):
            self.finish_atomically()
        else:
            self.tick()

    def die(self) -> None:
        """The process is gone, and with it what it held."""
        super().die()
        self.running, self.words = {}, {}
        if self.worker_id is not None:
            self.world.note("worker", "death", worker=self.worker_id)
            self.world.dead.append(self.worker_id)
            self.worker_id = None

    def begin(self) -> None:
        """Register, if this process has not."""
        if self.worker_id is not None:
            return
        self.incarnations += 1
        name = f"{self.name}.{self.incarnations}"
        new = store.NewWorker(name, name, "host", "boot", 1, None, None, ["open", "tight"], SLOTS)
        told = self.world.transact(self, lambda tx: store.register_worker(tx, new))
        if told.fate == "ok":
            self.worker_id = told.value
            self.world.note("worker", "start", worker=self.worker_id)

    def tick(self, *, finish: float = 0.6) -> None:
        """Do the tick of a worker's loop, the real one, and only then start what was claimed."""
        world = self.world
        for lease_id, claim in list(self.running.items()):
            if world.chance(finish):
                self._finish(lease_id, claim)
        told = list(self.words.values())
        ops = [tell(world, self, claim.job_id, word) for claim, word in told]
        assert self.worker_id is not None
        plan = Plan(
            worker_id=self.worker_id,
            settlements=lambda: [word for _, word in told],
            places=lambda: SLOTS - len(self.running),
            queues=world.dice.sample(("open", "tight"), 2),
            renew=[_held(claim) for claim in self.running.values() if world.chance(0.5)],
            may_expire=world.chance(0.5),
            careful=world.chance(0.15),
        )
        self._apply(world.attempt(self, lambda: tick(plan)), told, ops)

    def finish_atomically(self) -> None:
        """Ack in the transaction in which the function wrote; its rows live and die with the ack."""
        claim = self.world.dice.choice(list(self.running.values()))
        word = Settlement("ack", claim.lease_id, claim.token, "null")
        op = tell(self.world, self, claim.job_id, word)

        def body(tx: store.Transaction) -> Any:
            (settled,) = store.settle(tx, [word])
            if not settled.accepted:
                raise RolledBack
            return settled

        outcome = self.world.transact(self, body, joined=True)
        answer(self.world, op, outcome.fate, outcome.value)
        if outcome.fate == "ok":
            del self.running[claim.lease_id]
        elif outcome.fate == "unknown":
            self.die()

    def _finish(self, lease_id: int, claim: Claim) -> None:
        word = settlement(self.world, claim)
        self.words[lease_id] = (self.running.pop(lease_id), word)
        self.world.note("run", "end", job=claim.job_id, lease=lease_id, verb=word.verb)

    def _apply(
        self, outcome: Outcome, told: list[tuple[Claim, Settlement]], ops: list[str]
    ) -> None:
        """Believe and start only what was committed; if nobody knows, end."""
        done: Done | None = outcome.value
        for place, op in enumerate(ops):
            answer(self.world, op, outcome.fate, done.answers[place] if done else None)
        if outcome.fate == "unknown":
            self.die()
        if done is None:
            return
        for claim, _ in told:
            self.words.pop(claim.lease_id)
        for claim in done.claims:
            self._start(claim)

    def _start(self, claim: Claim) -> None:
        self.running[claim.lease_id] = claim
        self.world.started.append(claim)
        self.world.note(
            "run",
            "start",
            job=claim.job_id,
            lease=claim.lease_id,
            attempt=claim.attempt,
            token=digest(claim.token),
            label=label_of(claim.payload),
        )


@dataclass
class Recoverer(Actor):
    """Whoever finds out that workers have died, that leases are over and that jobs are due."""

    def step(self) -> None:
        """End the leases of the dead, or those whose time is over; wake what is due."""
        by_death = bool(self.world.dead) and self.world.chance(0.6)
        dead = list(self.world.dead)

        def body(tx: store.Transaction) -> None:
            if by_death:
                store.recover_dead(tx, dead)
            else:
                store.recover_expired(tx)
            store.promote(tx)

        outcome = self.world.transact(self, body)
        if by_death and outcome.fate == "ok":
            self.world.dead = [w for w in self.world.dead if w not in dead]


@dataclass
class LateOwner(Actor):
    """An owner of the past: it knows its lease and token still, and sometimes a later lease's id."""

    def step(self) -> None:
        """Tell something of an old lease, in a transaction that holds nothing else."""
        world = self.world
        if not world.started:
            return
        recent = world.started[-RECENT:]
        followed = [claim for claim in recent if self._newest(claim) != claim.lease_id]
        forges = bool(followed) and world.chance(0.5)
        claim = world.dice.choice(followed if forges else recent)
        word = settlement(world, claim)
        if forges:
            word.lease_id = self._newest(claim)
        op = tell(world, self, claim.job_id, word)
        renews = world.chance(0.3)

        def body(tx: store.Transaction) -> tuple[Any, int]:
            before = self._changes()
            if renews and forges:
                store.renew(tx, [(word.lease_id, claim.token, 1000.0)])
            (settled,) = store.settle(tx, [word])
            return settled, self._changes() - before

        outcome = world.transact(self, body)
        settled, changes = outcome.value or (None, 0)
        answer(world, op, outcome.fate, settled, changes=changes)

    def _newest(self, claim: Claim) -> int:
        """Return the id of the newest lease of the same job, whose token it does not know."""
        return max(c.lease_id for c in self.world.started if c.job_id == claim.job_id)

    def _changes(self) -> int:
        raw = self.world.scratch.connection(self.name).connection
        assert raw is not None, ALIAS
        return int(raw.execute(f"SELECT count(*) FROM {TABLE}").fetchone()[0])
