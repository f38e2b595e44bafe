"""Threads that work for a job besides its own: what they leave behind is seen, and harms no other."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import InternalError, connection, connections, transaction

from relay_queue.models import Job
from relay_queue.testing import run_on_enqueue, run_pending
from relay_queue.worker import slots as module
from relay_queue.worker.slots import Slots
from relay_queue.worker.threads import follow_threads
from tests import tasks
from tests.conftest import wait_until
from tests.worker.claims import claim_next, claim_of
from tests.worker.test_slots import LEAVERS, slot_threads, start, take

Make = Callable[[int], Slots]

LANES = sorted(tasks.LANES)
HELD = [
    tasks.hold_and_return,
    tasks.hold_and_fail,
    tasks.hold_and_return_async,
    tasks.hold_and_fail_async,
    tasks.hold_and_fail_in_a_thread,
    tasks.hold_and_sleep_async,
    tasks.hold_and_fail_in_a_loop,
    tasks.hold_and_fail_in_a_bridged_loop,
    tasks.hold_and_fail_atomically,
]


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture(autouse=True)
def kept(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Django keep connections for ever, if nobody closes them, and start anew."""
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    tasks.calls.clear()
    tasks.gate.clear()
    yield
    tasks.gate.set()
    tasks.pool.submit(connections.close_all).result()


@pytest.fixture
def make(kept: None) -> Iterator[Make]:
    made: list[Slots] = []

    def build(concurrency: int) -> Slots:
        made.append(Slots(concurrency, lambda: None))
        return made[-1]

    yield build
    tasks.gate.set()
    for slots in made:
        slots.close()
    wait_until(lambda: not slot_threads(), message=lambda: str(slot_threads()))


def end_sessions_of_others() -> None:
    """End them as a restart of the server does."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


# --- Transactions --------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
def test_transaction_left_open_in_another_thread_fails_the_job_and_swallows_no_other(
    make: Make, lane: str
) -> None:
    slots = make(1)
    for number in range(2):
        start(slots, claim_of(tasks.leave_open_in, lane))
        told = take(slots, 1)[0].settlement
        assert told.verb == "nack"
        assert "left a transaction open on 'default'" in told.message
        start(slots, claim_of(tasks.create_group_in, lane, f"next {number}"))
        assert take(slots, 1)[0].settlement.verb == "ack"
    assert set(Group.objects.values_list("name", flat=True)) == {"next 0", "next 1"}


@pytest.mark.parametrize("sensitive", [True, False])
def test_transaction_left_open_by_a_coroutine_is_seen_in_every_thread(
    make: Make, sensitive: bool
) -> None:
    slots = make(1)
    start(slots, claim_of(tasks.leave_open_async, sensitive))
    told = take(slots, 1)[0].settlement
    assert "left a transaction open on 'default'" in told.message
    start(slots, claim_of(tasks.create_group_async, "next", sensitive))
    assert take(slots, 1)[0].settlement.verb == "ack"
    assert Group.objects.get().name == "next"


@pytest.mark.parametrize("lane", LANES)
def test_threads_find_the_server_again_after_a_restart(make: Make, lane: str) -> None:
    slots = make(1)
    for name in ("before", "after"):
        start(slots, claim_of(tasks.create_group_in, lane, name))
        assert take(slots, 1)[0].settlement.verb == "ack"
        end_sessions_of_others()
    assert Group.objects.count() == 2


def test_loops_of_two_jobs_do_not_wait_for_each_other(make: Make) -> None:
    slots = make(2)
    start(slots, claim_of(tasks.wait_in, "loop"))
    wait_until(lambda: tasks.calls == ["waits"])
    start(slots, claim_of(tasks.create_group_in, "loop", "meanwhile"))
    assert take(slots, 1)[0].settlement.verb == "ack"
    assert not tasks.gate.is_set()
    tasks.gate.set()
    take(slots, 1)


def test_thread_that_borrows_a_connection_leaves_it_open(make: Make) -> None:
    slots = make(1)
    start(slots, claim_of(tasks.lend_connection))
    assert take(slots, 1)[0].settlement.result == "true"


# --- Whose they are ------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
def test_every_thread_knows_its_job_and_forgets_it(make: Make, lane: str) -> None:
    slots = make(1)
    claims = [claim_of(tasks.note_job_in, lane) for _ in range(2)]
    for claim in claims:
        start(slots, claim)
        take(slots, 1)
    assert [job.job_id for job in tasks.calls] == [claim.job_id for claim in claims]
    assert tasks.LANES[lane](tasks.current_context) is None


def test_threads_and_pools_outside_of_jobs_keep_their_connections() -> None:
    follow_threads()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(transaction.set_autocommit, False).result()
        pool.submit(Group.objects.create, name="ours").result()
        pool.submit(transaction.commit).result()
        pool.submit(connections.close_all).result()
    assert Group.objects.get().name == "ours"


def test_following_twice_wraps_once() -> None:
    follow_threads()
    wrapped = (threading.Thread.start, ThreadPoolExecutor.submit)
    follow_threads()
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == wrapped


# --- Session state -------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["", *LANES])
def test_session_state_of_one_function_is_not_found_by_the_next(make: Make, lane: str) -> None:
    slots = make(1)
    start(slots, claim_of(tasks.note_state, lane))
    take(slots, 1)
    start(slots, claim_of(tasks.leave_odd_state, lane))
    assert take(slots, 1)[0].settlement.verb == "ack"
    start(slots, claim_of(tasks.note_state, lane))
    assert take(slots, 1)[0].settlement.verb == "ack"
    before, after = tasks.calls
    assert before == after
    assert Job.objects.count() == 2, "both enqueues are in the table that workers read"


@pytest.fixture
def read_only(engine: str) -> Iterator[Callable[[str], None]]:
    """Return how to switch, for connections to come, whether the server takes no writes."""
    if engine != "postgresql":
        pytest.skip("a file has no server that could be demoted")

    def switch(to: str) -> None:
        with connection.cursor() as cursor:
            name = connection.ops.quote_name(connection.settings_dict["NAME"])
            cursor.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {to}")

    yield switch
    switch("off")


def test_connection_to_a_server_that_was_demoted_fails_one_job(
    make: Make, read_only: Callable[[str], None]
) -> None:
    slots = make(1)
    read_only("on")
    start(slots, claim_of(tasks.create_group, "refused"))
    assert "read-only" in take(slots, 1)[0].settlement.message
    read_only("off")
    for number in range(3):
        start(slots, claim_of(tasks.create_group, str(number)))
        assert take(slots, 1)[0].settlement.verb == "ack"


def test_enqueue_gives_a_connection_up_that_has_become_read_only(engine: str) -> None:
    if engine != "postgresql":
        pytest.skip("a file has no server that could be demoted")
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    with pytest.raises(InternalError, match="read-only"):
        tasks.noop.enqueue()
    tasks.noop.enqueue()
    assert Job.objects.count() == 1


# --- The helpers for tests -----------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
def test_helpers_see_what_other_threads_leave_open(lane: str) -> None:
    left = tasks.leave_open_in.enqueue(lane)
    assert run_pending() == 1
    left.refresh()
    assert "left a transaction open" in left.errors[0].traceback
    with run_on_enqueue():
        assert tasks.create_group_in.enqueue(lane, "next").is_finished
    assert Group.objects.get().name == "next"


@pytest.mark.parametrize(
    "task", [t for t, told in LEAVERS.items() if told == "nack"], ids=lambda task: task.name
)
def test_helpers_undo_what_is_left_open_in_the_thread_of_the_test(task: Any) -> None:
    left = task.enqueue()
    assert run_pending() == 1
    left.refresh()
    assert "left a transaction open on 'default'" in left.errors[0].traceback
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    assert not Group.objects.exists()


def test_helpers_keep_the_transaction_of_the_test() -> None:
    with transaction.atomic():
        Group.objects.create(name="of the test")
        left = tasks.leave_atomic_open.enqueue()
        assert run_pending() == 1
        left.refresh()
        assert "left a transaction open on 'default'" in left.errors[0].traceback
        tasks.create_group.enqueue("of the next")
        assert run_pending() == 1
    assert set(Group.objects.values_list("name", flat=True)) == {"of the test", "of the next"}


# --- Memory --------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Collect only what is asked for, as where nothing happens; nor does the suite's log hold errors."""
    logging.disable()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("task", HELD, ids=lambda task: task.name)
def test_idle_worker_holds_nothing_of_the_jobs_that_it_ran(
    make: Make, task: Any, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    slots = make(2)
    for _ in range(2):
        claim = claim_of(task)
        if task is tasks.hold_and_fail_atomically:
            task.enqueue()
            (claim,) = claim_next()
        if task is tasks.hold_and_sleep_async:
            claim.timeout_seconds = 0.05
        start(slots, claim)
        take(slots, 1)
    wait_until(lambda: not tasks.bulks, message=lambda: f"{len(tasks.bulks)} are held")
