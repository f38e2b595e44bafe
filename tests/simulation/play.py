"""Play one seed: deal out the turns, let everything drain, and check what is left."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from unittest import mock

from relay_queue import clock, store
from tests.history.checker import check, report
from tests.history.evidence import Evidence, Violation
from tests.history.journal import encode
from tests.simulation.clients import Operator, Producer
from tests.simulation.scratch import Connection, Scratch
from tests.simulation.workers import LateOwner, Recoverer, Worker
from tests.simulation.world import Actor, Died, World

STEPS = (35, 65)
"""How many turns are dealt in a seed, at least and at most."""

DRAIN_ROUNDS = 60
"""Far more than any job of a seed needs to use up its attempts."""

SECONDS = (0.001, 0.05, 0.2, 0.5, 1.0, 1.0, 2.0, 6.0)
"""What passes between two turns."""

JUMPS = (-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0)
"""How far a clock jumps."""


LIMITS = {"tight": (4, 2)}
"""Capacity and running jobs of the queues that have limits."""

LATE_AFTER_ALL = 3
"""How often an owner comes back when everything is over."""

A = TypeVar("A", bound=Actor)


@dataclass
class Played:
    """One seed that was played: what is known of it, and what is wrong with it."""

    seed: int
    seen: Evidence
    violations: list[Violation]

    @property
    def digest(self) -> str:
        """A hash of everything that happened, for a comparison with a replay."""
        told = hashlib.sha256()
        for record in self.seen.records:
            told.update(encode(record).encode())
        book = self.seen.ledger
        for rows in (book.jobs.values(), book.leases.values(), book.changes, book.counts.items()):
            for row in rows:
                told.update(repr(tuple(row)).encode())
        return told.hexdigest()

    def report(self) -> str:
        """Tell what went wrong, and how to see it again."""
        again = f"seed {self.seed} (python -m tests.simulation --seed {self.seed})"
        return report(self.seen, self.violations, again)


def play(seed: int, scratch: Scratch) -> Played:
    """Play one seed on a wiped database, and check its history."""
    scratch.wipe()
    world = World(seed, scratch)
    with _dealt_by(world, seed):
        _populate(world)
        for _ in range(world.dice.randint(*STEPS)):
            _turn(world)
        _drain(world)
    seen = Evidence(
        world.records, scratch.read(), steady=world.steady, complete=True, limits=LIMITS
    )
    return Played(seed, seen, check(seen))


@contextmanager
def _dealt_by(world: World, seed: int) -> Iterator[None]:
    """Let time, tokens and jitter come from the seed, and failures from the world."""
    tokens = random.Random(f"tokens {seed}")
    before = random.getstate()
    random.seed(f"jitter {seed}")
    try:
        with (
            clock.use(world.clock),
            mock.patch("os.urandom", tokens.randbytes),
            mock.patch("relay_queue.wakeup.ring", world.ring),
            mock.patch.object(Connection, "strikes", world),
        ):
            yield
    finally:
        random.setstate(before)


def _limiting(queue: str, capacity: int, running: int) -> Callable[[store.Transaction], None]:
    return lambda tx: store.set_limits(tx, queue, capacity=capacity, max_running=running)


def _populate(world: World) -> None:
    operator = Operator(world, "operator")
    world.actors = [
        *(Producer(world, f"producer{n}") for n in (1, 2)),
        *(Worker(world, f"worker{n}") for n in (1, 2, 3)),
        Recoverer(world, "recoverer"),
        LateOwner(world, "late"),
        operator,
    ]
    world.faults = False
    world.transact(operator, lambda tx: store.ensure_queue(tx, "open"))
    for queue, (capacity, running) in LIMITS.items():
        world.transact(operator, _limiting(queue, capacity, running))
    world.faults = True


WEIGHTS = {Producer: 6, Worker: 10, Recoverer: 5, LateOwner: 4, Operator: 4}
"""How often each kind of actor has its turn."""


def _turn(world: World) -> None:
    """Let time pass and give one actor its turn."""
    before = world.now
    world.advance(world.dice.choice(SECONDS))
    awake = [actor for actor in world.actors if actor.resting == 0]
    for actor in world.actors:
        if actor.resting:
            actor.resting -= 1
            actor.slept += world.now - before
    if not awake:
        return
    actor = world.dice.choices(awake, weights=[WEIGHTS[type(a)] for a in awake])[0]
    if not world.steady and world.chance(0.1):
        jump = world.dice.choice(JUMPS)
        actor.skew += timedelta(seconds=jump)
        world.note("fault", "clock", actor=actor.name, seconds=jump)
    _act(actor)


def _act(actor: Actor) -> None:
    try:
        actor.step()
    except Died:
        actor.die()


def _drain(world: World) -> None:
    """Without further faults, let the living finish and the dead be recovered; then come late."""
    world.faults = False
    for actor in world.actors:
        actor.resting, actor.skew = 0, timedelta(0)
    (operator,) = _of(world, Operator)
    for queue in ("open", "tight"):
        operator.on_queue("resume", queue)
    for worker in _of(world, Worker):
        worker.begin()
    for _ in range(DRAIN_ROUNDS):
        if not world.unfinished():
            break
        _work_off(world)
    (late,) = _of(world, LateOwner)
    for _ in range(LATE_AFTER_ALL):
        world.advance(0.01)
        late.step()


def _work_off(world: World) -> None:
    """Give every job one attempt more."""
    (recoverer,) = _of(world, Recoverer)
    recoverer.step()
    for worker in _of(world, Worker):
        world.advance(0.01)
        worker.tick(finish=1.0)
    for worker in _of(world, Worker):
        world.advance(0.01)
        if worker.running:
            worker.tick(finish=1.0)
    # Longer than any lease or back-off, so that a round is enough for an attempt.
    world.advance(400.0)


def _of(world: World, kind: type[A]) -> list[A]:
    return [actor for actor in world.actors if isinstance(actor, kind)]
