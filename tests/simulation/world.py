"""The world of one seed: its time, its dice, its records, and the turns in which actors commit."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeVar

from django.db import DatabaseError, connections
from django.db.transaction import atomic

from relay_queue import store
from relay_queue.store.dialects import dialect_for
from relay_queue.store.records import Claim
from tests.history.journal import Record
from tests.simulation.scratch import ALIAS, Scratch

T = TypeVar("T")

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)

Fault = Literal[
    "calm", "rival", "die inside", "die before", "die after", "full", "unknown no", "unknown yes"
]
FAULTS: dict[Fault, int] = {
    "calm": 76,
    "rival": 9,
    "die inside": 2,
    "die before": 2,
    "die after": 3,
    "full": 4,
    "unknown no": 2,
    "unknown yes": 2,
}
"""What may happen to a transaction, and how often in a hundred."""

Fate = Literal["ok", "nothing", "unknown"]


class Died(BaseException):
    """The process of an actor is gone, in the middle of whatever it did."""


class RolledBack(Exception):
    """A client changed its mind inside its transaction."""


class Outcome(NamedTuple):
    """What an actor knows of its transaction, and what the transaction returned if it stands."""

    fate: Fate
    value: Any = None


@dataclass
class Actor:
    """Somebody with a connection and a clock of its own, as if it were a process."""

    world: World
    name: str
    skew: timedelta = timedelta(0)
    resting: int = 0
    slept: timedelta = timedelta(0)

    def step(self) -> None:
        """Do one thing, in at most one transaction."""
        raise NotImplementedError

    def die(self) -> None:
        """The process is gone. What it held in memory is lost, and its transaction never was.

        Its connection goes to its successor, to save the opening of another, unless it died on the
        way into a block, which leaves a transaction open.
        """
        self.world.note("fault", "death", actor=self.name)
        connection = self.world.scratch.connection(self.name)
        connection.run_on_commit.clear()
        if connection.in_transaction():
            connection.close()


@dataclass
class Turn:
    """One actor in one transaction, and the fault that waits for it."""

    actor: Actor
    fault: Fault
    boundary: int
    at: str
    labels: list[str]
    begun: bool = False


class World:
    """Everything that chance decides in one seed."""

    def __init__(self, seed: int, scratch: Scratch) -> None:
        self.dice = random.Random(f"relay {seed}")
        self.scratch = scratch
        self.now = START
        self.records: list[Record] = []
        self.actors: list[Actor] = []
        self.turns: list[Turn] = []
        self.steady = self.dice.random() < 0.6
        self.faults = True
        self.started: list[Claim] = []
        self.dead: list[int] = []
        self._operations = 0

    # --- time and records

    def clock(self) -> datetime:
        """Return the time as the actor whose turn it is sees it."""
        return self.now + (self.turns[-1].actor.skew if self.turns else timedelta(0))

    def moment(self) -> str:
        """Return the true time for the notes of the database: one time for a transaction."""
        return self.turns[-1].at if self.turns else self.time()

    def time(self) -> str:
        """Return the true time, for records."""
        return self.now.isoformat(timespec="microseconds")

    def advance(self, seconds: float) -> None:
        """Let time pass, at least a millisecond."""
        self.now += timedelta(milliseconds=max(1, round(seconds * 1000)))

    def note(self, kind: str, phase: str = "", **facts: Any) -> None:
        """Write a record, as clients and functions do outside Relay."""
        self.records.append({"at": self.time(), "kind": kind, "phase": phase, **facts})

    def operation(self, actor: Actor) -> str:
        """Return a name for what an actor is about to ask."""
        self._operations += 1
        return f"{actor.name}-{self._operations}"

    def chance(self, probability: float) -> bool:
        """Throw the dice."""
        return self.dice.random() < probability

    # --- turns

    def transact(
        self,
        actor: Actor,
        body: Callable[[store.Transaction], T],
        *,
        labels: list[str] | None = None,
        joined: bool = False,
    ) -> Outcome:
        """Run ``body`` in a transaction of an actor, and say what the actor knows of it.

        ``joined`` opens it inside a transaction of the client's own. Raises as `attempt` does.
        """

        def run() -> T:
            with ExitStack() as blocks:
                if joined:
                    blocks.enter_context(atomic(using=ALIAS))
                with store.transaction() as tx:
                    return body(tx)

        return self.attempt(actor, run, labels)

    def attempt(
        self, actor: Actor, run: Callable[[], T], labels: list[str] | None = None
    ) -> Outcome:
        """Run what opens one transaction, in the turn of an actor and under its fault.

        Raises `Died`, after which nobody is told anything.
        """
        # Whoever intrudes meets no faults: one at a time is enough, and the story stays readable.
        calm = not self.faults or bool(self.turns)
        fault: Fault = "calm" if calm else self._draw_fault()
        turn = Turn(actor, fault, self.dice.randrange(8), self.time(), labels or [])
        self.turns.append(turn)
        try:
            connections[ALIAS] = self.scratch.connection(actor.name)
            return Outcome("ok", run())
        except RolledBack:
            return Outcome("nothing")
        except DatabaseError as error:
            return self._failed(actor, error, turn.begun)
        finally:
            self.turns.pop()
            if self.turns:
                connections[ALIAS] = self.scratch.connection(self.turns[-1].actor.name)

    def _draw_fault(self) -> Fault:
        return self.dice.choices(list(FAULTS), weights=list(FAULTS.values()))[0]

    def _failed(self, actor: Actor, error: DatabaseError, begun: bool) -> Outcome:
        trouble = dialect_for(connections[ALIAS]).diagnose(error)
        if trouble == "unknown":
            self.note("fault", "unknown", actor=actor.name)
            return Outcome("unknown")
        if trouble == "busy":
            self.note("busy", begun=begun, actor=actor.name)
        elif trouble == "full":
            self.note("fault", "full", actor=actor.name)
        else:
            self.note("error", actor=actor.name, text=repr(error))
        return Outcome("nothing")

    # --- strikes: called by the connections

    def between_statements(self) -> None:
        """Another actor may try to act here, or this one's process may end."""
        turn = self.turns[-1]
        turn.begun = True
        if turn.fault not in ("rival", "die inside"):
            return
        turn.boundary -= 1
        if turn.boundary >= 0:
            return
        fault, turn.fault = turn.fault, "calm"
        if fault == "die inside":
            raise Died
        self.intrude(turn.actor)

    def intrude(self, owner: Actor) -> None:
        """Let another actor act in the middle of somebody's transaction."""
        others = [a for a in self.actors if a is not owner and a.resting == 0]
        if others:
            rival = self.dice.choice(others)
            self.advance(0.001)
            self.note("fault", "rival", actor=rival.name, owner=owner.name)
            rival.step()

    def before_commit(self) -> None:
        """The disk may be full, the device may fail, the process may end."""
        fault = self.turns[-1].fault if self.turns else "calm"
        if fault == "die before":
            raise Died
        if fault == "full":
            raise _error("database or disk is full", sqlite3.SQLITE_FULL)
        if fault == "unknown no":
            raise _error("disk I/O error", sqlite3.SQLITE_IOERR_FSYNC)

    def after_commit(self) -> None:
        """It is committed; whether the process hears of it is another matter."""
        fault = self.turns[-1].fault if self.turns else "calm"
        if fault == "die after":
            self.turns[-1].fault = "calm"
            raise Died
        if fault == "unknown yes":
            self.turns[-1].fault = "calm"
            raise _error("disk I/O error", sqlite3.SQLITE_IOERR_FSYNC)

    def ring(self, _path: str) -> int:
        """Hear the bell: look with another connection whether the job is there."""
        for label in self.turns[-1].labels if self.turns else ():
            self.note("ring", label=label, visible=bool(self._count(label)))
        return 0

    def _count(self, label: str) -> int:
        sql = (
            "SELECT count(*) FROM relay_queue_job WHERE json_extract(payload, '$.kwargs.label') = ?"
        )
        return int(self.scratch.reader.execute(sql, [label]).fetchone()[0])

    def jobs_in(self, states: Sequence[str]) -> list[int]:
        """Return the newest jobs in one of these states, past Relay."""
        marks = ", ".join("?" * len(states))
        sql = f"SELECT id FROM relay_queue_job WHERE state IN ({marks}) ORDER BY id DESC LIMIT 5"
        return [row[0] for row in self.scratch.reader.execute(sql, states)]

    def newest_job(self) -> int:
        """Return the id of the newest job, past Relay; 0 if there is none."""
        row = self.scratch.reader.execute("SELECT max(id) FROM relay_queue_job").fetchone()
        return int(row[0] or 0)

    def unfinished(self) -> int:
        """Count the jobs that have not ended, past Relay."""
        sql = "SELECT count(*) FROM relay_queue_job WHERE finished_at IS NULL"
        return int(self.scratch.reader.execute(sql).fetchone()[0])


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
