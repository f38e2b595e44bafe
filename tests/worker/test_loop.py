"""The loop in this very process: what it does when it is told to stop, and when a commit fails."""

from __future__ import annotations

import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError, connection, transaction
from psycopg.errors import DiskFull, IoError, LockNotAvailable

from relay_queue import clock, store
from relay_queue.models import Job, Lease, Worker
from relay_queue.query import looks
from relay_queue.query.status import excluded_by
from relay_queue.states import WorkerOrder
from relay_queue.store.dialects import dialect_for
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker import loop as module
from relay_queue.worker import pacing
from relay_queue.worker import tick as tick_module
from relay_queue.worker.database import EXIT_UNKNOWN
from relay_queue.worker.identity import register
from relay_queue.worker.loop import HAND_OVER_SECONDS, Loop
from relay_queue.worker.options import DRAIN, QUIT, READY, WorkerOptions
from relay_queue.worker.plan import CLAIM, PROMOTE, RECOVER, Done, Plan
from relay_queue.worker.tick import tick
from relay_queue.worker.waiting import Orders, Waiting, Woken
from tests import tasks
from tests.conftest import wait_until
from tests.store import actions

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


OPTIONS = {
    "name": "unit",
    "queues": None,
    "exclude_queues": (),
    "backend": None,
    "concurrency": 2,
    "lease_seconds": None,
    "shutdown_timeout_seconds": 60.0,
    "drain": True,
    "max_jobs": None,
}

Serve = Callable[..., int]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    tasks.calls.clear()
    tasks.gate.clear()
    yield
    tasks.gate.set()


@pytest.fixture
def supervisor() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of the control line: the supervisor's and the worker's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def serve(supervisor: tuple[socket.socket, socket.socket]) -> Serve:
    """Return a function that runs a loop to its end in this thread and returns its exit code."""

    def run(**changes: Any) -> int:
        options = WorkerOptions(**{**OPTIONS, **changes})
        identity = register(options)
        waiting = Waiting(supervisor[1].fileno())
        if identity.bell is not None:
            waiting.listen_to(identity.bell)
        loop = Loop(options, identity, waiting)
        try:
            return loop.run()
        finally:
            identity.retire(keep_lock=False)
            loop.slots.close()
            tasks.gate.set()
            wait_until(lambda: not [t for t in threading.enumerate() if "relay-slot" in t.name])

    return run


def states() -> list[str]:
    return list(Job.objects.order_by("id").values_list("state", flat=True))


def failing(trouble: str, times: int = 1) -> Callable[[Plan], Done]:
    """Return a tick that fails some times when it has outcomes to settle, then works."""
    left = [None] * times

    def fail(told: Sequence[Settlement]) -> None:
        if left and told:
            left.pop()
            raise database_error(trouble)

    return meddling(fail)


def losing(losses: list[str], committed: bool) -> Callable[[Plan], Done]:
    """Return a tick that loses the connection once for each name, when it has such things.

    What it did is committed, or rolled back; nobody can tell which.
    """

    def lose(plan: Plan) -> Done:
        done = None
        with suppress(OperationalError), transaction.atomic():
            done = tick(plan)
            lost = bool(losses and getattr(done, losses[0]))
            if lost and not committed:
                raise OperationalError("rolled back")
        if lost:
            losses.pop(0)
            raise OperationalError("the connection is lost")
        return done

    return lose


def meddling(meddle: Callable[[Sequence[Settlement]], None]) -> Callable[[Plan], Done]:
    """Return a tick that shows its outcomes to ``meddle``, in its transaction, and settles them."""

    def meddled(plan: Plan) -> Done:
        ask = plan.settlements

        def settlements() -> Sequence[Settlement]:
            told = ask()
            meddle(told)
            return told

        plan.settlements = settlements
        return tick(plan)

    return meddled


SQLITE_CODES = {
    "busy": sqlite3.SQLITE_BUSY,
    "full": sqlite3.SQLITE_FULL,
    "unknown": sqlite3.SQLITE_IOERR,
}
POSTGRESQL_CAUSES = {"busy": LockNotAvailable, "full": DiskFull, "unknown": IoError}


def database_error(trouble: str) -> OperationalError:
    """Return what Django raises when the engine in use has this trouble."""
    cause: Exception
    if connection.vendor == "postgresql":
        cause = POSTGRESQL_CAUSES[trouble]("by the test")
    else:
        cause = sqlite3.OperationalError("by the test")
        cause.sqlite_errorcode = SQLITE_CODES[trouble]
    error = OperationalError("by the test")
    error.__cause__ = cause
    return error


# --- a life --------------------------------------------------------------------------------


def test_it_says_ready_does_what_there_is_and_signs_off(
    serve: Serve, supervisor: tuple[socket.socket, socket.socket]
) -> None:
    for number in range(20):
        tasks.note.enqueue(number)
    assert serve() == 0
    assert supervisor[0].recv(8) == READY
    assert sorted(tasks.calls) == list(range(20))
    assert set(states()) == {"succeeded"}
    (row,) = Worker.objects.all()
    assert row.stopped_at is not None
    assert (row.stop_reason, row.name, row.concurrency) == ("stopped", "unit", 2)


def test_jobs_that_jobs_enqueue_are_done_before_it_ends(serve: Serve) -> None:
    tasks.enqueue_note.enqueue("child")
    assert serve() == 0
    assert tasks.calls == ["child"]


def test_it_claims_no_more_jobs_than_it_may(serve: Serve) -> None:
    for number in range(5):
        tasks.note.enqueue(number)
    assert serve(max_jobs=3, drain=False) == 0
    assert sorted(tasks.calls) == [0, 1, 2]
    assert states().count("ready") == 2


def test_queues_are_served_in_turn_and_in_the_order_given(serve: Serve) -> None:
    for queue in ("b", "a", "c"):
        for number in range(2):
            tasks.note.using(queue_name=queue).enqueue(f"{queue}{number}")
    assert serve(queues=("c", "b"), concurrency=1) == 0
    assert tasks.calls == ["c0", "b0", "c1", "b1"]


def test_excluded_queues_are_left_alone(serve: Serve) -> None:
    tasks.note.using(queue_name="mine").enqueue("mine")
    tasks.note.using(queue_name="theirs").enqueue("theirs")
    assert serve(exclude_queues=("theirs",)) == 0
    assert excluded_by(Worker.objects.get()) == ["theirs"]
    assert tasks.calls == ["mine"]


# --- a ring ---------------------------------------------------------------------------------


def test_a_loop_rings_once_for_what_its_tick_made_ready_and_once_when_it_leaves(
    serve: Serve,
) -> None:
    tasks.note.using(run_after=clock.now() + timedelta(hours=1)).enqueue("due")
    Job.objects.update(available_at=clock.now() - timedelta(seconds=1))
    rings: list[list[str]] = []
    with mock.patch("relay_queue.wakeup.ring", side_effect=lambda _: rings.append(states())):
        assert serve() == 0
    assert tasks.calls == ["due"]
    assert rings[1:] == [["succeeded"]]
    assert rings[0] != ["scheduled"]  # it was committed


class Script(Waiting):
    """Sleeps that end as a test says, at once, and the seconds that the loop asked for."""

    def __init__(self, line: socket.socket, turns: Iterator[Woken]) -> None:
        super().__init__(line.fileno())
        self.turns = turns
        self.asked = 0.0

    def wait(self, seconds: float) -> Woken:
        """Let the test go on until it says why the sleep ends."""
        self.asked = seconds
        return next(self.turns)


class Played:
    """A loop whose every turn is told to it, what it did since it was last asked, and its sleeps."""

    def __init__(self, line: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.line = line
        self.did: list[str] = []
        check = looks.ready_queues

        def checking() -> set[str]:
            self.did.append("check")
            return check()

        def ticking(plan: Plan) -> Done:
            done = tick(plan)
            if done.asked:
                self.did.append(f"claim {len(done.claims)}")
            return done

        monkeypatch.setattr(looks, "ready_queues", checking)
        monkeypatch.setattr(module, "tick", ticking)

    def run(self, turns: Callable[[], Iterator[Woken]], **changes: Any) -> None:
        """Run a loop from its first look to the end of the turns."""

        def every() -> Iterator[Woken]:
            yield from (Woken(), Woken())  # the first look and the first tick
            self.did.clear()
            yield from turns()
            tasks.gate.set()
            yield Woken(quit=True)

        options = WorkerOptions(**{**OPTIONS, "drain": False, **changes})
        identity = register(options)
        self.waiting = Script(self.line, every())
        self.loop = Loop(options, identity, self.waiting)
        try:
            assert self.loop.run() == 0
        finally:
            identity.retire(keep_lock=False)
            self.loop.slots.close()
            tasks.gate.set()
            wait_until(lambda: not [t for t in threading.enumerate() if "relay-slot" in t.name])


@pytest.fixture
def played(
    supervisor: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> Played:
    settings.RELAY = {**settings.RELAY, "POLL_SECONDS": 300.0}
    for name in ("PROBE_SECONDS", "FLUSH_SECONDS"):
        monkeypatch.setattr(pacing, name, 300.0)
    actions.enqueue(run_after=clock.now() + timedelta(days=1))  # so that the queue is known
    return Played(supervisor[1], monkeypatch)


def test_an_idle_loop_claims_at_once_when_it_is_rung_and_checks_afterwards(played: Played) -> None:
    def turns() -> Iterator[Woken]:
        for number in range(2):
            tasks.note.enqueue(number)
            yield Woken(rung=True)
            assert played.did == ["claim 1"]
            assert played.waiting.asked >= HAND_OVER_SECONDS, "functions begin before it goes on"
            wait_until(lambda: played.loop.slots.has_finished)
            yield Woken()
            assert played.did == ["claim 1", "check"]
            played.did.clear()

    played.run(turns)
    assert (tasks.calls, states()[1:]) == ([0, 1], ["succeeded"] * 2)


def test_a_ring_for_a_job_that_is_due_later_is_planned_for_in_the_turn_behind(
    played: Played,
) -> None:
    def turns() -> Iterator[Woken]:
        actions.enqueue(run_after=clock.now() + timedelta(seconds=5))
        yield Woken(rung=True)
        assert (played.did, played.waiting.asked) == (["claim 0"], 0)
        yield Woken()
        assert played.did == ["claim 0", "check"]
        assert 0 < played.waiting.asked <= 5

    played.run(turns)


def test_a_ring_for_a_queue_that_was_not_there_before_leads_to_its_job(played: Played) -> None:
    def turns() -> Iterator[Woken]:
        tasks.note.using(queue_name="new").enqueue("new")
        yield Woken(rung=True)
        yield Woken()
        assert played.did == ["claim 0", "check", "check", "claim 1"]

    played.run(turns)


def test_a_loop_that_runs_a_function_checks_before_it_claims(played: Played) -> None:
    def turns() -> Iterator[Woken]:
        tasks.wait.enqueue()
        yield Woken(rung=True)
        yield Woken()
        played.did.clear()
        tasks.note.enqueue("second")
        yield Woken(rung=True)
        assert played.did == ["check", "claim 1"]

    played.run(turns)


def test_a_running_job_learns_of_its_cancellation_in_the_turn_of_the_ring(played: Played) -> None:
    def turns() -> Iterator[Woken]:
        tasks.wait.enqueue()
        yield Woken(rung=True)
        yield Woken()
        played.did.clear()
        actions.cancel(Job.objects.get(state="running").pk)
        yield Woken(rung=True)
        assert (played.did, played.loop.slots.stuck) == (["check"], 1)

    played.run(turns)


def test_a_job_that_was_cancelled_while_it_was_claimed_learns_of_it_in_the_turn_behind(
    played: Played,
) -> None:
    def turns() -> Iterator[Woken]:
        tasks.wait.enqueue()
        yield Woken(rung=True)
        actions.cancel(Job.objects.get(state="running").pk)
        yield Woken(rung=True)
        assert (played.did, played.loop.slots.stuck) == (["claim 1", "check"], 1)

    played.run(turns)


@pytest.mark.parametrize("name", ["backend", "quiet", "stopping"])
def test_a_loop_that_may_not_claim_or_pays_for_it_checks_first(played: Played, name: str) -> None:
    def turns() -> Iterator[Woken]:
        if name == "quiet":
            Worker.objects.update(ordered="quiet")
            yield Woken(look=True)  # with it the loop reads its orders
            played.did.clear()
        if name == "stopping":
            tasks.wait.enqueue()
            yield Woken(rung=True)
            yield Woken(drain=True)
            played.did.clear()
        tasks.note.enqueue("one")
        yield Woken(rung=True)
        assert played.did == ["check"] + ["claim 1"] * (name == "backend")

    played.run(turns, backend="default" if name == "backend" else None)


def test_it_claims_no_more_at_a_ring_than_it_may(played: Played) -> None:
    def turns() -> Iterator[Woken]:
        for number in range(2):
            tasks.note.enqueue(number)
        yield Woken(rung=True)
        assert played.did == ["claim 1"]
        wait_until(lambda: played.loop.slots.has_finished)
        yield Woken()

    played.run(turns, max_jobs=1)
    assert states()[1:] == ["succeeded", "ready"]


def test_a_tick_behind_a_failed_read_has_a_new_connection(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale: list[bool] = []
    check = looks.ready_queues

    def fail() -> set[str]:
        monkeypatch.setattr(looks, "ready_queues", check)
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")
        raise AssertionError("the statement has failed")

    def ticking(plan: Plan) -> Done:
        stale.append(played.loop.database._stale)
        return tick(plan)

    def turns() -> Iterator[Woken]:
        played.loop.pace.claims_on_ring = False
        played.loop.timers.write_soon()
        monkeypatch.setattr(looks, "ready_queues", fail)
        monkeypatch.setattr(module, "tick", ticking)
        yield Woken(rung=True)
        assert played.loop.failures.hindrance
        assert stale == [False]

    played.run(turns)


def test_a_worker_whose_row_is_deleted_keeps_its_order() -> None:
    worker_id = actions.register()
    orders = Orders(worker_id)
    actions.do(store.order_workers, [worker_id], WorkerOrder.QUIET)
    assert (orders.read(), orders.quiet) == (True, True)
    Worker.objects.all().delete()
    assert (orders.read(), orders.quiet) == (False, True)


@pytest.mark.parametrize(("quiet", "overdue"), [(False, False), (True, False), (False, True)])
def test_a_probe_tells_which_steps_have_nothing_to_do(
    played: Played, quiet: bool, overdue: bool
) -> None:
    def turns() -> Iterator[Woken]:
        yield Woken()
        played.loop.orders.current = WorkerOrder.QUIET if quiet else ""
        played.loop.timers.overdue = overdue
        steps = played.loop._nothing_to_do()
        assert (CLAIM in steps, RECOVER in steps, PROMOTE in steps) == (
            quiet,
            not overdue,
            not overdue,
        )

    played.run(turns)


# --- told to stop -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [DRAIN, QUIT])
def test_after_an_order_to_stop_it_claims_nothing(
    serve: Serve, supervisor: tuple[socket.socket, socket.socket], order: bytes
) -> None:
    tasks.note.enqueue("never")
    supervisor[0].send(order)
    assert serve(drain=False) == 0
    assert (states(), tasks.calls) == (["ready"], [])


def test_the_end_of_the_supervisor_is_an_order_to_stop(
    serve: Serve, supervisor: tuple[socket.socket, socket.socket]
) -> None:
    tasks.note.enqueue("never")
    supervisor[0].close()
    assert serve(drain=False) == 0
    assert states() == ["ready"]


def test_what_does_not_end_in_time_is_handed_back_uncharged(
    serve: Serve, supervisor: tuple[socket.socket, socket.socket]
) -> None:
    tasks.wait.enqueue()
    stop_when_running(supervisor[0])
    assert serve(drain=False, shutdown_timeout_seconds=0.05) == 0
    assert states() == ["ready"]
    assert Job.objects.get().attempt == 0
    assert Lease.objects.get().outcome == "released"


def test_what_ends_in_time_is_acked(
    serve: Serve, supervisor: tuple[socket.socket, socket.socket]
) -> None:
    tasks.wait.enqueue()
    stop_when_running(supervisor[0], then=tasks.gate.set)
    assert serve(drain=False) == 0
    assert states() == ["succeeded"]


def stop_when_running(line: socket.socket, then: Callable[[], None] = lambda: None) -> None:
    """Order the worker to stop as soon as its job has begun."""
    from relay_queue.worker.slots import Slots

    begin = Slots.start

    def start(self: Slots, *arguments: Any) -> None:
        begin(self, *arguments)
        line.send(DRAIN)
        then()
        Slots.start = begin  # type: ignore[method-assign]

    Slots.start = start  # type: ignore[method-assign]


def test_what_a_tick_settles_is_counted_soon_although_that_tick_has_written_the_counts(
    serve: Serve, supervisor: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "FLUSH_SECONDS", 0.0)  # every tick writes them
    monkeypatch.setattr(pacing, "HEARTBEAT_SECONDS", 60.0)
    seen: list[int] = []

    def watch() -> None:
        try:
            wait_until(lambda: sum(Worker.objects.values_list("succeeded", flat=True)))
            seen.append(Worker.objects.get().succeeded)
        finally:
            supervisor[0].send(DRAIN)
            connection.close()

    tasks.note.enqueue("counted")
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert serve(drain=False) == 0
    watcher.join()
    assert seen == [1]


# --- a commit fails -----------------------------------------------------------------------------


def test_while_the_database_is_busy_outcomes_are_kept(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "tick", failing("busy", times=5))
    tasks.note.enqueue("once")
    assert serve() == 0
    assert (states(), tasks.calls) == (["succeeded"], ["once"])
    assert Lease.objects.get().outcome == "acked"


def test_on_a_full_disk_outcomes_are_kept_and_claims_wait(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "tick", failing("full"))
    for number in range(3):
        tasks.note.enqueue(number)
    assert serve(concurrency=1) == 0
    assert set(states()) == {"succeeded"}
    assert sorted(tasks.calls) == [0, 1, 2]
    assert caplog.text.count("No room for the database") == 1


def test_after_an_error_of_the_disk_it_ends_with_a_code_of_its_own(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "tick", failing("unknown"))
    tasks.note.enqueue("once")
    assert serve() == EXIT_UNKNOWN
    assert tasks.calls == ["once"]
    assert Lease.objects.get().ended_at is None, "the lease decides"
    assert Worker.objects.get().stopped_at is None


@pytest.mark.parametrize("committed", [False, True])
def test_after_a_lost_connection_outcomes_are_told_once_more_and_no_claim_is_kept_unknown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    losses = ["settlements", "claims"]

    monkeypatch.setattr(module, "tick", losing(losses, committed))
    monkeypatch.setattr(type(dialect_for(connection)), "diagnose", lambda *_: "lost")
    for number in range(4):
        tasks.note.enqueue(number)
    assert serve(concurrency=1) == 0
    assert not losses
    assert sorted(tasks.calls) == [0, 1, 2, 3]
    assert set(states()) == {"succeeded"}
    assert set(Job.objects.values_list("attempt", flat=True)) == {1}
    assert not Lease.objects.filter(refused_at__isnull=False).exists()
    # What was claimed by a commit that nobody knew of was handed back.
    assert Lease.objects.filter(outcome="unrun").exists() == committed


def test_nothing_starts_before_its_claim_is_committed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = tick_module._claim
    failures = [database_error("busy")] * 2

    def claim_then_fail(tx: Any, plan: Plan, done: Done) -> list[Claim]:
        claims = claim(tx, plan, done)
        if claims and failures:
            raise failures.pop()
        return claims

    monkeypatch.setattr(tick_module, "_claim", claim_then_fail)
    tasks.note.enqueue("once")
    assert serve() == 0
    assert not failures, "the claims of two ticks were rolled back"
    assert tasks.calls == ["once"]
    assert actions.outcomes(Job.objects.get().pk) == ["acked"]


def test_a_job_that_is_cancelled_between_claim_and_ack_stays_cancelled(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cancel(told: Sequence[Settlement]) -> None:
        if told and states() == ["running"]:
            actions.cancel(Job.objects.get().pk)

    monkeypatch.setattr(module, "tick", meddling(cancel))
    tasks.note.enqueue("once")
    assert serve() == 0
    lease = Lease.objects.get()
    assert (states(), lease.outcome) == (["cancelled"], "cancelled")
    assert (lease.refused_verb, "was refused" in caplog.text) == ("ack", True)
