"""Transactions that overlap, as only PostgreSQL lets them: who waits, who passes, who is refused.

Each test holds one transaction open in a thread and looks at what another can do meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, transaction
from django.test.utils import CaptureQueriesContext
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from relay_queue import clock, store
from relay_queue.exceptions import IdempotencyConflict, QueueFull, QueueInUse
from relay_queue.models import Job, Lease, Queue, QueueCount, Schedule, ScheduleRun, Worker
from relay_queue.query import looks
from relay_queue.store.dialects import dialect_for, pg_cursor
from relay_queue.store.dialects.pg_cursor import PreparedCursor
from relay_queue.store.dialects.postgresql import OutcomeUnknown
from tests import tasks
from tests.conftest import PATIENCE_SECONDS, wait_until
from tests.store.actions import (
    ack,
    assert_counters_exact,
    atomic,
    cancel,
    claim,
    claimed_ids,
    connection,
    do,
    enqueue,
    enqueue_each,
    job,
    read,
    read_lease,
    real_counts,
    register,
    rolled_back,
    rows,
    state,
)
from tests.store.test_schedules import declared

pytestmark = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)


class Other:
    """Somebody else: a thread with a connection of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def starts(self, act: Callable[[], Any]) -> Future[Any]:
        """Begin an act without waiting for its end."""
        return self._pool.submit(act)

    def does(self, act: Callable[[], Any]) -> Any:
        """Return what an act returns. Raises ``TimeoutError`` if it has to wait for us."""
        return self.starts(act).result(PATIENCE_SECONDS)

    def close(self) -> None:
        """End the thread and its connection."""
        self._pool.submit(lambda: connection().close())
        self._pool.shutdown()


@pytest.fixture
def other(engine: str) -> Iterator[Other]:
    other = Other()
    yield other
    other.close()


def waits(future: Future[Any]) -> bool:
    """Wait until the act waits for a lock of ours, or is over; say which."""

    def blocked() -> bool:
        with connection().cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_locks WHERE NOT granted "
                "AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
            )
            return bool(cursor.fetchone()[0])

    wait_until(lambda: blocked() or future.done())
    return not future.done()


def limit(**limits: Any) -> None:
    do(store.set_limits, "default", **{"capacity": None, "max_running": None, **limits})


# --- who does not wait --------------------------------------------------------------------------


def test_producers_do_not_wait_for_each_other(other: Other) -> None:
    enqueue()
    with store.transaction() as tx:
        store.enqueue(tx, job())
        tx.flush()
        other.does(lambda: enqueue_each(3))
    assert rows(QueueCount).filter(state="ready").count() == 2, "two shards were written"
    assert_counters_exact()


def test_more_open_transactions_than_a_server_has_processors_wait_for_no_counter(
    other: Other,
) -> None:
    enqueue()  # so that the row of the queue is there
    opened = threading.Barrier(81)

    def hold_open() -> None:
        try:
            with store.transaction() as tx:
                store.enqueue(tx, job())
                tx.flush()
                opened.wait(PATIENCE_SECONDS)
        finally:
            connection().close()

    with ThreadPoolExecutor(80) as crowd:
        late = [crowd.submit(hold_open) for _ in range(80)]
        try:
            wait_until(lambda: opened.n_waiting == 80 or any(act.done() for act in late))
            other.does(lambda: [enqueue_each(1), ack(claim(1)[0])])
        finally:
            opened.wait(PATIENCE_SECONDS)
        for act in late:
            act.result(PATIENCE_SECONDS)
    assert rows(QueueCount).filter(state="ready").count() >= 81
    assert_counters_exact()


def keyed(*keys: str, queue: str = "default") -> list[store.NewJob]:
    return [job(queue=queue, idempotency_key=key) for key in keys]


@pytest.mark.parametrize("joined", [False, True])
def test_batches_of_the_same_keys_in_other_orders_do_not_wait_crosswise(
    other: Other, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    for queue in "ab":
        enqueue(queue=queue)
    monkeypatch.setattr(pg_cursor, "EXCHANGED_AT_ONCE", 1)  # row by row, so that they meet midway
    start = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def batch(jobs: list[store.NewJob]) -> list[int]:
        start.wait()
        with atomic() if joined else nullcontext(), store.transaction() as tx:
            return [answer.job_id for answer in store.enqueue_many(tx, jobs)]

    for n in range(5):
        names = [f"{n}-{k}" for k in range(60)]
        jobs = [*keyed(*names, queue="a"), *keyed(*reversed(names), queue="b")]
        late = other.starts(lambda jobs=jobs[::-1]: batch(jobs))
        assert batch(jobs) == late.result(PATIENCE_SECONDS)[::-1]
    assert real_counts() == {("a", "ready"): 301, ("b", "ready"): 301}
    assert_counters_exact()


def test_a_batch_with_keys_is_answered_and_claimed_in_the_order_of_its_calls(engine: str) -> None:
    wanted = [*keyed("z", "b"), job(), *keyed("m", "a"), job()]
    answers = do(store.enqueue_many, wanted)
    told = [rows(Job).get(pk=answer.job_id).idempotency_key for answer in answers]
    assert told == ["z", "b", None, "m", "a", None]
    assert claimed_ids(6) == [answer.job_id for answer in answers]


def test_a_transaction_of_many_enqueues_writes_one_shard(other: Other) -> None:
    with store.transaction() as tx:
        for _ in range(3):
            store.enqueue(tx, job())
            tx.flush()
    assert rows(QueueCount).filter(state="ready").count() == 1


def test_a_claim_passes_over_the_jobs_of_another_that_has_not_committed(other: Other) -> None:
    ids = enqueue_each(5)
    with store.transaction() as tx:
        held = store.claim(tx, worker_id=None, queues=["default"], limit=2)
        taken = other.does(lambda: claimed_ids(9))
    assert [claim.job_id for claim in held] == ids[:2]
    assert taken == ids[2:]
    assert_counters_exact()


def test_what_a_claim_passed_over_is_ready_again_if_it_rolls_back(other: Other) -> None:
    ids = enqueue_each(2)
    with rolled_back() as tx:
        assert store.claim(tx, worker_id=None, queues=["default"], limit=2)
    assert other.does(lambda: claimed_ids(2)) == ids


def test_operators_pause_a_queue_while_jobs_of_it_are_being_claimed(other: Other) -> None:
    enqueue()
    with store.transaction() as tx:
        assert store.claim(tx, worker_id=None, queues=["default"], limit=1)
        other.does(lambda: do(store.pause, "default"))


# --- who waits, and is refused then --------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_a_place_that_is_being_taken_is_waited_for(other: Other, commits: bool) -> None:
    enqueue()
    limit(capacity=2)
    try:
        with store.transaction() as tx:
            store.enqueue(tx, job())
            late = other.starts(enqueue)
            assert waits(late)
            if not commits:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    if commits:
        with pytest.raises(QueueFull):
            late.result(PATIENCE_SECONDS)
    else:
        late.result(PATIENCE_SECONDS)
    assert real_counts() == {("default", "ready"): 2}
    assert_counters_exact()


def test_limits_that_somebody_holds_are_changed_after_the_commit(other: Other) -> None:
    limit(capacity=5)
    with store.transaction() as tx:
        assert store.hold_limits(tx, "default") == {"capacity": 5, "max_running": None}
        later = other.starts(lambda: do(_add_one_to_the_capacity))
        assert waits(later)
        store.set_limits(tx, "default", capacity=7)
    later.result(PATIENCE_SECONDS)
    assert do(store.hold_limits, "default") == {"capacity": 8, "max_running": None}


def _add_one_to_the_capacity(tx: store.Transaction) -> None:
    """Change a limit by what it is, as the form of the limits and ``relay limits`` do."""
    capacity = store.hold_limits(tx, "default")["capacity"]
    store.set_limits(tx, "default", capacity=(capacity or 0) + 1)


def test_running_jobs_never_exceed_their_limit_when_claims_meet(other: Other) -> None:
    enqueue_each(5)
    limit(max_running=3)
    with store.transaction() as tx:
        assert len(store.claim(tx, worker_id=None, queues=["default"], limit=2)) == 2
        late = other.starts(lambda: claim(5))
        assert waits(late)
    assert len(late.result(PATIENCE_SECONDS)) == 1
    assert_counters_exact()


@pytest.fixture
def snapshots(other: Other) -> Iterator[None]:
    """Let the transactions of both connections begin with a snapshot, as OPTIONS may ask for."""

    def begin_with(level: IsolationLevel | None) -> None:
        connection().ensure_connection()
        connection().connection.isolation_level = level

    for does in (other.does, lambda act: act()):
        does(lambda: begin_with(IsolationLevel.REPEATABLE_READ))
    yield
    begin_with(None)


@pytest.mark.usefixtures("snapshots")
def test_a_capacity_holds_whatever_the_isolation_of_a_connection_is(other: Other) -> None:
    limit(capacity=1)
    with store.transaction() as tx:
        store.enqueue(tx, job())
        late = other.starts(enqueue)
        assert waits(late)
    with pytest.raises(QueueFull):
        late.result(PATIENCE_SECONDS)
    with atomic(), connection().cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        assert cursor.fetchone() == ("repeatable read",), "a caller's own is the caller's"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("commits", [True, False])
def test_a_key_that_is_being_taken_is_waited_for(other: Other, many: bool, commits: bool) -> None:
    same = job(idempotency_key="k", args=[1])

    def again() -> store.Enqueued:
        return do(store.enqueue_many, [same])[0] if many else do(store.enqueue, same)

    first = None
    try:
        with store.transaction() as tx:
            first = store.enqueue(tx, same)
            late = other.starts(again)
            assert waits(late)
            if not commits:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    answer = late.result(PATIENCE_SECONDS)
    assert answer.created is not commits
    assert first is not None
    assert (answer.job_id == first.job_id) is commits
    assert real_counts() == {("default", "ready"): 1}
    assert_counters_exact()


def test_a_key_that_was_taken_meanwhile_by_another_call_is_a_conflict(other: Other) -> None:
    with store.transaction() as tx:
        store.enqueue(tx, job(idempotency_key="k", args=[1]))
        late = other.starts(lambda: do(store.enqueue, job(idempotency_key="k", args=[2])))
        assert waits(late)
    with pytest.raises(IdempotencyConflict):
        late.result(PATIENCE_SECONDS)
    assert_counters_exact()


def test_an_ack_that_meets_a_cancel_is_refused_if_the_cancel_commits(other: Other) -> None:
    held = [claim_each() for claim_each in [lambda: claim(1)[0]] * 2 if enqueue()]
    with store.transaction() as tx:
        store.cancel(tx, [each.job_id for each in held])
        words = [store.Settlement("ack", each.lease_id, each.token) for each in reversed(held)]
        late = other.starts(lambda: do(store.settle, words))
        assert waits(late)
    assert [answer.accepted for answer in late.result(PATIENCE_SECONDS)] == [False, False]
    assert_counters_exact()


def test_a_cancel_that_meets_an_ack_skips_what_has_succeeded(other: Other) -> None:
    enqueue_each(2)
    first, second = claim(2)
    with store.transaction() as tx:
        assert store.ack(tx, second.lease_id, second.token).accepted
        late = other.starts(lambda: do(store.cancel, [first.job_id, second.job_id]))
        assert waits(late)
    changed = late.result(PATIENCE_SECONDS)
    assert (changed.job_ids, changed.skipped) == ([first.job_id], {second.job_id: "succeeded"})
    assert_counters_exact()


def test_a_recount_waits_for_those_who_have_moved_jobs(other: Other) -> None:
    enqueue_each(3)
    with store.transaction() as tx:
        store.claim(tx, worker_id=None, queues=["default"], limit=2)
        tx.flush()
        late = other.starts(lambda: do(store.recount, "default"))
        assert waits(late)
    assert late.result(PATIENCE_SECONDS) == {"ready": 1, "running": 2}
    assert_counters_exact()


def test_whoever_moves_jobs_during_a_recount_adds_to_the_new_counters(other: Other) -> None:
    enqueue_each(3)
    with store.transaction() as tx:
        store.recount(tx, "default")
        late = other.starts(lambda: claim(2))
        assert waits(late)
    assert len(late.result(PATIENCE_SECONDS)) == 2
    assert_counters_exact()


@pytest.mark.slow
def test_owners_and_operators_that_meet_on_the_same_jobs_do_not_deadlock(engine: str) -> None:
    faults: list[BaseException] = []
    until = time.monotonic() + 3

    def churn(number: int) -> None:
        try:
            while time.monotonic() < until:
                ids = enqueue_each(3)
                held = claim(6)
                if number % 2:
                    do(store.cancel, [c.job_id for c in reversed(held)] + ids)
                else:
                    words = [store.Settlement("nack", c.lease_id, c.token) for c in held]
                    do(store.settle, words)
                    do(store.requeue, [c.job_id for c in held])
        except BaseException as error:
            faults.append(error)
        finally:
            connection().close()

    threads = [threading.Thread(target=churn, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert_counters_exact()


def test_whoever_stands_alone_waits_for_those_who_hold_leases(other: Other) -> None:
    enqueue()
    held = claim(1)[0]
    with store.transaction() as tx:
        store.renew(tx, [(held.lease_id, held.token, 60.0)])
        alone = other.starts(lambda: do(store.lock_lease_table))
        assert waits(alone)
    alone.result(PATIENCE_SECONDS)


# --- what an error means -------------------------------------------------------------------------


def trouble(error: Exception) -> str:
    return dialect_for(connection()).diagnose(error)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM nowhere",
        "SELECT nothing FROM relay_queue_job",
        "SELECT 'x'::text = 1",
        "EXECUTE unknown",
        "INSERT INTO relay_queue_worker SELECT * FROM relay_queue_worker",
        "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '42501'; END $$",
        "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '55000'; END $$",
    ],
)
def test_an_error_of_a_table_a_right_or_a_sequence_is_none_of_the_values(
    engine: str, statement: str
) -> None:
    register()
    with pytest.raises(DatabaseError) as raised, store.transaction() as tx:
        tx.execute(statement)
    assert trouble(raised.value) == "tables"


@pytest.mark.parametrize(
    "statement",
    ["SELECT 1 / 0", "SELECT 'x'::int", "DO $$ BEGIN RAISE EXCEPTION 'no'; END $$"],
)
def test_an_error_that_may_lie_in_the_values_is_told_apart(engine: str, statement: str) -> None:
    with pytest.raises(DatabaseError) as raised, store.transaction() as tx:
        tx.execute(statement)
    assert trouble(raised.value) == "data"


def test_a_command_whose_statements_became_stale_is_begun_again(engine: str) -> None:
    def look() -> list[tuple[object, ...]]:
        return store.in_transaction(lambda tx: tx.fetch("SELECT * FROM changing WHERE a > %s", [0]))

    with connection().cursor() as cursor:
        cursor.execute("CREATE TABLE changing (a int)")
        try:
            assert look() == look() == []
            cursor.execute("ALTER TABLE changing ADD COLUMN b int")
            cursor.execute("INSERT INTO changing VALUES (1, 2)")
            assert look() == [(1, 2)]
        finally:
            cursor.execute("DROP TABLE changing")


def end_session(pid: int) -> None:
    with connection().cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


def my_pid() -> int:
    with connection().cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def test_a_wait_that_is_too_long_means_that_nothing_happened(other: Other) -> None:
    enqueue()
    limit(capacity=5)

    def impatient() -> None:
        with store.transaction(wait_seconds=0.05) as tx:
            store.enqueue(tx, job())

    with store.transaction() as tx:
        store.enqueue(tx, job())
        with pytest.raises(OperationalError) as caught:
            other.does(impatient)
    assert trouble(caught.value) == "busy"
    assert_counters_exact()


def test_a_deadlock_means_that_nothing_happened(other: Other) -> None:
    enqueue(queue="a")
    enqueue(queue="b")
    for queue in "ab":
        do(store.set_limits, queue, capacity=9, max_running=None)

    def crosswise() -> None:
        with store.transaction() as tx:
            store.enqueue(tx, job(queue="b"))
            store.enqueue(tx, job(queue="a"))

    faults = []
    try:
        with store.transaction() as tx:
            store.enqueue(tx, job(queue="a"))
            late = other.starts(crosswise)
            assert waits(late)
            store.enqueue(tx, job(queue="b"))
    except DatabaseError as error:
        faults.append(error)
    try:
        late.result(PATIENCE_SECONDS)
    except DatabaseError as error:
        faults.append(error)
    assert [trouble(error) for error in faults] == ["busy"]
    assert_counters_exact()


def test_what_a_deadlock_undid_is_begun_again(other: Other) -> None:
    with deadlock(other) as (crosswise, tries):
        assert store.in_transaction(crosswise).created
    assert len(tries) == 2
    assert real_counts() == {("a", "ready"): 3, ("b", "ready"): 3}
    assert_counters_exact()


def test_an_enqueue_that_a_deadlock_undid_is_begun_again(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.enqueue

    with deadlock(other) as (crosswise, tries):

        def put_crosswise(tx: store.Transaction, wanted: store.NewJob) -> store.Enqueued:
            is_ours = wanted.options.task == tasks.note.module_path
            return crosswise(tx) if is_ours else put(tx, wanted)

        monkeypatch.setattr(store, "enqueue", put_crosswise)
        tasks.note.enqueue("once")
    assert len(tries) == 2
    assert_counters_exact()


def test_what_a_deadlock_undid_of_a_callers_transaction_is_for_the_caller_to_repeat(
    other: Other,
) -> None:
    with (
        deadlock(other) as (crosswise, tries),
        pytest.raises(DatabaseError),
        transaction.atomic(using=connection().alias),
    ):
        store.in_transaction(crosswise)
    assert len(tries) == 1
    assert_counters_exact()


@contextmanager
def deadlock(other: Other) -> Iterator[tuple[Callable[[store.Transaction], Any], list[int]]]:
    """Give an act that runs into a deadlock and is chosen as its victim, but only the first time.

    The list gets an entry for each time that it is begun.
    """
    for queue in "ab":
        enqueue(queue=queue)
        do(store.set_limits, queue, capacity=9, max_running=None)
    tries: list[int] = []
    b_is_taken, a_is_wanted = threading.Event(), threading.Event()

    def rival() -> None:
        with store.transaction() as tx:
            tx.execute("SET LOCAL deadlock_timeout = '30s'")
            store.enqueue(tx, job(queue="b"))
            b_is_taken.set()
            assert a_is_wanted.wait(PATIENCE_SECONDS)
            store.enqueue(tx, job(queue="a"))

    def crosswise(tx: store.Transaction) -> store.Enqueued:
        if tries:
            late.result(
                PATIENCE_SECONDS
            )  # else the second try may lock first what the rival was about to get
        tries.append(len(tries))
        # Whoever loses patience first is the victim.
        tx.execute("SET LOCAL deadlock_timeout = '20ms'")
        store.enqueue(tx, job(queue="a"))
        if len(tries) == 1:
            a_is_wanted.set()
            assert waits(late)
        return store.enqueue(tx, job(queue="b"))

    late = other.starts(rival)
    assert b_is_taken.wait(PATIENCE_SECONDS)
    yield crosswise, tries
    late.result(PATIENCE_SECONDS)


def test_a_connection_that_died_while_idle_is_opened_again_unseen(other: Other) -> None:
    before = other.does(my_pid)
    end_session(before)
    other.does(enqueue)
    assert other.does(my_pid) != before
    assert_counters_exact()


def test_a_connection_that_dies_inside_a_transaction_means_that_nothing_happened(
    other: Other,
) -> None:
    reached, killed = threading.Event(), threading.Event()

    def enqueue_slowly() -> None:
        with store.transaction() as tx:
            store.enqueue(tx, job())
            pids.append(my_pid())
            reached.set()
            assert killed.wait(PATIENCE_SECONDS)
            store.enqueue(tx, job())

    pids: list[int] = []
    late = other.starts(enqueue_slowly)
    assert reached.wait(PATIENCE_SECONDS)
    end_session(pids[0])
    killed.set()
    with pytest.raises(DatabaseError) as caught:
        late.result(PATIENCE_SECONDS)
    assert trouble(caught.value) == "lost"
    assert real_counts() == {}
    other.does(enqueue)


@contextmanager
def dying_at_commit() -> Iterator[None]:
    """Let every session that commits a new job die in the middle of its commit."""
    with connection().cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$"
        )
        cursor.execute(
            "CREATE CONSTRAINT TRIGGER die AFTER INSERT ON relay_queue_job "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die()"
        )
    try:
        yield
    finally:
        with connection().cursor() as cursor:
            cursor.execute("DROP FUNCTION die() CASCADE")


def test_a_connection_that_dies_while_committing_leaves_the_outcome_unknown(other: Other) -> None:
    with dying_at_commit():
        late = other.starts(enqueue)
        with pytest.raises(DatabaseError) as caught:
            late.result(PATIENCE_SECONDS)
    assert isinstance(caught.value, OutcomeUnknown)


def test_values_that_no_column_holds_are_a_fault_of_the_values(engine: str) -> None:
    with pytest.raises(DatabaseError) as caught, store.transaction() as tx:
        tx.execute("SELECT 'not a number'::int")
    assert trouble(caught.value) == "data"


# --- whose clock ---------------------------------------------------------------------------------


def test_leases_follow_the_clock_of_the_server(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine whose clock is an hour ahead.
    ahead = timedelta(hours=1)
    monkeypatch.setattr(clock, "now", lambda: datetime.now(UTC) + ahead)
    job_id = enqueue()
    (held,) = claim(1)
    assert abs(held.acquired_at - datetime.now(UTC)) < ahead / 2
    assert abs(read(job_id).created_at - datetime.now(UTC)) < ahead / 2
    assert ack(held).accepted
    cancel(enqueue())


def test_what_is_due_next_is_told_with_the_time_of_the_server(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue()
    claim(1)
    enqueue(run_after=datetime.now(UTC) + timedelta(minutes=1))
    behind = timedelta(hours=1)
    monkeypatch.setattr(clock, "now", lambda: datetime.now(UTC) - behind)
    due_at, expires_at, now = looks.next_times()
    assert abs(now - datetime.now(UTC)) < behind / 2
    assert due_at is not None
    assert expires_at is not None
    assert looks.read_queues().now >= now


def test_a_lease_begins_after_the_last_one_of_its_job_has_ended(other: Other) -> None:
    enqueue()
    (first,) = claim(1)
    with store.transaction() as tx:
        other.does(lambda: do(store.release, first.lease_id, first.token))
        (second,) = store.claim(tx, worker_id=None, queues=["default"], limit=1)
    ended_at = rows(Lease).get(pk=first.lease_id).ended_at
    assert tx.now < ended_at, "the clock was read before"
    assert ended_at <= second.acquired_at == rows(Lease).get(pk=second.lease_id).acquired_at


def test_the_clock_does_not_stand_still_in_a_callers_transaction(engine: str) -> None:
    with store.transaction() as outer:
        enqueue()
        with store.transaction() as inner:
            assert inner.now > outer.now


# --- a transaction that begins with its first statement ----------------------------------------


WAIT = "7s"


def lazily() -> store.transaction:
    return store.transaction(wait_seconds=7.0, first=True, defer_begin=True)


@pytest.fixture
def exchanges(engine: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of statements of each exchange with the server."""
    seen: list[int] = []
    exchange = PreparedCursor._exchange

    def counting(self: PreparedCursor, messages: list[Any]) -> Any:
        seen.append(len(self._state.posted) + len(messages))
        return exchange(self, messages)

    monkeypatch.setattr(PreparedCursor, "_exchange", counting)
    return seen


def take(tx: store.Transaction) -> list[store.Claim]:
    return store.claim(tx, worker_id=None, queues=["default"], limit=1)


def test_a_worker_claims_in_two_exchanges_with_the_server(exchanges: list[int]) -> None:
    for _ in range(2):
        enqueue()
    claim(1)  # so that the queue is known to be unlimited
    exchanges.clear()
    with lazily() as tx:
        (held,) = take(tx)
    assert exchanges == [3, 2], "begin, clock and all of the claim; count and commit"
    assert (state(held.job_id), rows(Lease).get(pk=held.lease_id).token) == ("running", held.token)
    assert_counters_exact()


def test_rights_on_tables_suffice_to_claim(engine: str) -> None:
    """An insert may draw from the sequence of an identity column; nobody else may, unless granted."""
    enqueue_each(3)
    claim(1)  # so that the queue is known to be unlimited
    with connection().cursor() as cursor, atomic():
        cursor.execute(
            "CREATE ROLE relay_clerk;"
            "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO relay_clerk;"
            "SET LOCAL ROLE relay_clerk"
        )
        assert len(claim(2)) == 2
        transaction.set_rollback(True, using=connection().alias)


def test_each_of_many_claims_names_the_lease_of_its_own_job(engine: str) -> None:
    enqueue()
    ack(claim(1)[0])  # so that the queue is known to be unlimited
    for priority in (0, 2, 1):
        enqueue(priority=priority)
    claims = claim(3)
    assert [held.priority for held in claims] == [2, 1, 0]
    for held in claims:
        lease = read_lease(held.lease_id)
        assert (lease.job_id, lease.token) == (held.job_id, held.token)


def test_its_clock_is_read_as_it_begins_and_its_waits_are_bounded(exchanges: list[int]) -> None:
    with lazily() as tx:
        take(tx)
        assert tx.fetch("SELECT current_setting('lock_timeout')") == [(WAIT,)]
        ((before, after),) = tx.fetch("SELECT now(), clock_timestamp()")
        assert before <= tx.now < after
        assert tx.now is tx.now
    assert exchanges[0] == 3


def test_one_that_is_only_asked_for_its_clock_begins_then(exchanges: list[int]) -> None:
    with lazily() as tx:
        now = tx.now
        assert exchanges == [2]
        take(tx)
        assert tx.now == now


def test_one_of_which_nothing_was_asked_is_no_error(exchanges: list[int]) -> None:
    with lazily():
        pass
    with lazily() as tx:
        assert tx.fetch("SELECT count(*) FROM relay_queue_job") == [(0,)]


def test_where_somebody_watches_it_begins_at_once(engine: str) -> None:
    enqueue()
    with CaptureQueriesContext(connection()) as seen, lazily() as tx:
        assert tx.fetch("SELECT current_setting('lock_timeout')") == [(WAIT,)]
        assert len(take(tx)) == 1
    assert any("relay_queue_job" in query["sql"] for query in seen)
    assert_counters_exact()


def test_one_that_joins_it_has_a_clock_of_its_own(engine: str) -> None:
    with lazily() as outer:
        take(outer)
        with store.transaction() as inner:
            assert outer.now < inner.now


def test_a_connection_that_died_before_it_began_is_lost_and_the_next_one_is_new(
    other: Other,
) -> None:
    enqueue()

    def claims() -> list[store.Claim]:
        with lazily() as tx:
            return take(tx)

    before = other.does(my_pid)
    end_session(before)
    with pytest.raises(DatabaseError) as caught:
        other.does(claims)
    assert trouble(caught.value) == "lost"
    other.does(lambda: connection().close())
    (held,) = other.does(claims)
    assert state(held.job_id) == "running"


def test_a_fault_in_its_first_statement_undoes_it(engine: str) -> None:
    with pytest.raises(DatabaseError) as caught, lazily() as tx:
        tx.fetch("SELECT %s::int", ["no number"])
    assert trouble(caught.value) == "data"
    enqueue()
    with lazily() as tx:
        assert len(take(tx)) == 1
    assert_counters_exact()


@pytest.mark.parametrize("lazily", [True, False])
def test_hooks_and_savepoints_work_in_a_workers_own_transaction(engine: str, lazily: bool) -> None:
    told: list[str] = []

    def on_commit(word: str) -> None:
        transaction.on_commit(lambda: told.append(word), using=connection().alias)

    with store.transaction(first=True, wait_seconds=7.0, defer_begin=lazily) as tx:
        store.enqueue(tx, job())
        on_commit("kept")
        with suppress(ZeroDivisionError), store.transaction() as inner:
            store.enqueue(inner, job())
            on_commit("savepoint")
            1 / 0  # noqa: B018
        assert told == []
    assert (told, real_counts()) == (["kept"], {("default", "ready"): 1})
    with suppress(ZeroDivisionError), store.transaction(first=True, wait_seconds=7.0) as tx:
        store.enqueue(tx, job())
        on_commit("undone")
        1 / 0  # noqa: B018
    assert (told, real_counts()) == (["kept"], {("default", "ready"): 1})
    assert connection().get_autocommit()
    assert connection().connection.info.transaction_status == TransactionStatus.IDLE
    assert_counters_exact()


def test_an_error_in_a_workers_own_transaction_undoes_all_of_it(engine: str) -> None:
    with pytest.raises(DatabaseError), store.transaction(first=True, wait_seconds=7.0) as tx:  # noqa: PT012
        store.enqueue(tx, job())
        with suppress(DatabaseError):
            tx.execute("SELECT 1/0")
        enqueue()
    assert real_counts() == {}
    with store.transaction(first=True, wait_seconds=7.0) as tx:
        store.enqueue(tx, job())
    assert real_counts() == {("default", "ready"): 1}


def test_a_pooler_is_given_no_prepared_statements(engine: str, settings: Any) -> None:
    connection().close()
    connection().settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = True
    try:
        assert state(enqueue()) == "ready"
        with connection().cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_prepared_statements")
            assert cursor.fetchone() == (0,)
    finally:
        connection().settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = False
    enqueue()
    with connection().cursor() as cursor:
        cursor.execute("SELECT count(*) > 0 FROM pg_prepared_statements")
        assert cursor.fetchone() == (True,)
    assert rows(Worker).count() == 0


# --- a queue is deleted --------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["first job", "another job"])
@pytest.mark.parametrize("joined", [True, False], ids=["caller's", "own"])
def test_a_queue_into_which_an_open_transaction_has_enqueued_is_not_deleted(
    other: Other, first: bool, joined: bool
) -> None:
    if not first:
        do(store.ensure_queue, "mail")
        job_id = enqueue(queue="mail")
        cancel(job_id)
        do(lambda tx: store.prune(tx, "cancelled", tx.now + timedelta(seconds=1), 9))
    with atomic() if joined else nullcontext(), store.transaction() as tx:
        store.enqueue(tx, job(queue="mail"))
        with pytest.raises(OperationalError, match="lock timeout"):
            other.does(lambda: do(store.delete_queue, "mail"))
    with pytest.raises(QueueInUse):
        other.does(lambda: do(store.delete_queue, "mail"))
    assert claim(1, "mail")
    assert_counters_exact()


@pytest.mark.parametrize("many", [True, False])
def test_an_enqueue_that_waits_for_a_deletion_makes_the_queue_anew(
    other: Other, many: bool
) -> None:
    other.does(lambda: cancel(enqueue(queue="mail")))  # this process knows the queue
    do(lambda tx: store.prune(tx, "cancelled", tx.now + timedelta(seconds=1), 9))
    jobs = [job(queue="mail")] * 2
    with store.transaction() as tx:
        assert store.delete_queue(tx, "mail")
        late = other.starts(
            (lambda: do(store.enqueue_many, jobs)) if many else lambda: enqueue(queue="mail")
        )
        assert waits(late)
    late.result(PATIENCE_SECONDS)
    assert rows(Queue).get().name == "mail"
    assert len(claim(2, "mail")) == 1 + many
    assert_counters_exact()


def test_a_deletion_leaves_the_callers_lock_timeout_as_it_was(engine: str) -> None:
    with atomic(), connection().cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '7s'")
        do(store.delete_queue, "mail")
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone()[0] == "7s"


# --- schedules -----------------------------------------------------------------------------------


def test_a_schedule_waits_for_a_queue_that_somebody_is_filling_and_keeps_no_other_back(
    other: Other,
) -> None:
    do(store.set_limits, "tight", capacity=9)
    past = clock.now() - timedelta(seconds=90)
    with clock.use(lambda: past):
        do(
            store.sync_schedules,
            "code:tests",
            [declared("a", queue="tight", start_at=None), declared("b", start_at=None)],
        )
    with store.transaction() as tx:
        store.enqueue(tx, job(queue="tight"))
        assert other.does(lambda: do(store.fire_schedules)) == 1
    ids = dict(rows(Schedule).values_list("name", "pk"))
    assert {run.schedule_id for run in rows(ScheduleRun)} == {ids["b"]}
    assert do(store.fire_schedules) == 1
    fired = Counter(rows(ScheduleRun).values_list("schedule_id", "outcome"))
    assert fired[ids["a"], "enqueued"] == fired[ids["b"], "enqueued"] > 0
    assert_counters_exact()


def test_workers_that_fire_at_the_same_time_pass_over_what_the_other_fires(other: Other) -> None:
    past = clock.now() - timedelta(seconds=70)
    with clock.use(lambda: past):
        do(store.sync_schedules, "code:tests", [declared("a", start_at=None, missed="skip")])
    with store.transaction() as tx:
        assert store.fire_schedules(tx) == 1
        assert other.does(lambda: do(store.fire_schedules)) == 0
    assert rows(Job).count() == rows(ScheduleRun).filter(outcome="enqueued").count() > 0


def test_two_deploys_at_once_add_a_schedule_once(other: Other) -> None:
    with store.transaction() as tx:
        store.sync_schedules(tx, "code:tests", [declared("a", start_at=None)])
        late = other.starts(
            lambda: do(store.sync_schedules, "code:tests", [declared("a", start_at=None)])
        )
        assert waits(late)
    late.result(PATIENCE_SECONDS)
    assert rows(Schedule).count() == 1


def test_a_claim_that_is_not_committed_keeps_its_queue(other: Other) -> None:
    enqueue(queue="mail")
    with store.transaction() as tx:
        assert store.claim(tx, worker_id=None, queues=["mail"], limit=1)
        with pytest.raises((OperationalError, QueueInUse)):
            other.does(lambda: do(store.delete_queue, "mail"))
    assert rows(Queue).filter(pk="mail").exists()
