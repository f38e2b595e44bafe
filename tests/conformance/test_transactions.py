"""An enqueue lives and dies with the caller's rows, and rings only when they are committed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.test import TestCase
from psycopg import sql

from relay_queue import store
from relay_queue.compat import TaskResultDoesNotExist, TaskResultStatus, task_backends
from relay_queue.db.filename import database_path
from relay_queue.exceptions import PayloadError, QueueFull
from relay_queue.models import Job
from relay_queue.testing import run_on_enqueue, run_pending
from relay_queue.wakeup import Doorbell
from relay_queue.wakeup.session import FIND_CHANNEL
from tests import tasks
from tests.conformance.conftest import Aliases

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


class Notifications:
    """The bell of PostgreSQL, as a worker's session hears it."""

    def __init__(self, address: str) -> None:
        self._line = psycopg.connect(address, autocommit=True)
        (self._channel,) = self._line.execute(FIND_CHANNEL).fetchone() or ("",)
        self._heard: list[str] = []
        self._line.add_notify_handler(lambda notify: self._heard.append(notify.payload))
        self._line.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))

    def clear(self) -> int:
        """Return how many rings there were; they come in order, so those before our own are all."""
        self._line.execute("SELECT pg_notify(%s, 'end')", [self._channel])
        while "end" not in self._heard:
            self._line.execute("SELECT 1")
        rings = self._heard.index("end")
        self._heard.clear()
        return rings

    def close(self) -> None:
        self._line.close()


def enqueue_one() -> list[Any]:
    return [tasks.noop.enqueue()]


def enqueue_from_a_coroutine() -> list[Any]:
    return [async_to_sync(tasks.noop.aenqueue)()]


def enqueue_many() -> list[Any]:
    backend: Any = task_backends["default"]
    return list(backend.enqueue_many([tasks.noop.bind(), tasks.noop.bind()]))


def enqueue_many_from_a_coroutine() -> list[Any]:
    backend: Any = task_backends["default"]
    return list(async_to_sync(backend.aenqueue_many)([tasks.noop.bind()]))


every_way = pytest.mark.parametrize(
    "enqueue",
    [enqueue_one, enqueue_from_a_coroutine, enqueue_many, enqueue_many_from_a_coroutine],
)


AnyBell = Doorbell | Notifications


@pytest.fixture
def bell(transactional_db: None, request: pytest.FixtureRequest) -> Iterator[AnyBell]:
    """Return a bell of the engine, as a worker hangs one."""
    path = database_path("default")
    bell: AnyBell = (
        Doorbell(path, "conformance")
        if path is not None
        else Notifications(request.getfixturevalue("server_database"))
    )
    yield bell
    bell.close()


def jobs_seen_by_others() -> int:
    """Count the jobs on another connection, which sees what is committed."""
    seen: list[int] = []

    def count() -> None:
        seen.append(Job.objects.count())
        connection.close()

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return seen[0]


@contextmanager
def rolled_back(using: str = "default") -> Iterator[None]:
    try:
        with transaction.atomic(using=using):
            yield
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


@every_way
def test_outside_of_a_transaction_the_job_is_there_and_rings_at_once(
    enqueue: Any, bell: AnyBell
) -> None:
    results = enqueue()
    assert jobs_seen_by_others() == len(results)
    assert bell.clear() == 1


@every_way
def test_inside_atomic_the_job_commits_with_the_rows_and_rings_then(
    enqueue: Any, bell: AnyBell
) -> None:
    with transaction.atomic():
        Group.objects.create(name="row")
        results = enqueue()
        assert all(result.id for result in results)
        assert jobs_seen_by_others() == 0
        assert bell.clear() == 0
    assert jobs_seen_by_others() == len(results)
    assert bell.clear() == 1


@every_way
def test_inside_atomic_the_job_rolls_back_with_the_rows_and_never_rings(
    enqueue: Any, bell: AnyBell
) -> None:
    with rolled_back():
        Group.objects.create(name="row")
        results = enqueue()
    assert not Job.objects.exists()
    assert not Group.objects.exists()
    assert bell.clear() == 0
    with pytest.raises(TaskResultDoesNotExist):
        results[0].refresh()


@every_way
def test_savepoint_that_rolls_back_takes_its_job_with_it(enqueue: Any, bell: AnyBell) -> None:
    with transaction.atomic():
        kept = tasks.add.enqueue(1)
        with rolled_back():
            enqueue()
            with transaction.atomic():
                enqueue()
    assert [str(pk) for pk in Job.objects.values_list("pk", flat=True)] == [kept.id]
    assert bell.clear() == 1


@every_way
def test_savepoint_that_stays_keeps_its_job(enqueue: Any) -> None:
    with transaction.atomic():
        with transaction.atomic():
            results = enqueue()
        with rolled_back():
            tasks.add.enqueue(1)
    assert Job.objects.count() == len(results)
    assert run_pending() == len(results)


def test_many_enqueues_of_one_transaction_ring_once(bell: AnyBell) -> None:
    with transaction.atomic():
        for _ in range(20):
            tasks.noop.enqueue()
    assert bell.clear() == 1


def test_counters_follow_a_rollback() -> None:
    with store.transaction() as tx:
        store.ensure_queue(tx, "small")
        store.set_limits(tx, "small", capacity=1, max_running=None)
    small = tasks.noop.using(queue_name="small")
    with rolled_back():
        small.enqueue()
        with pytest.raises(QueueFull):
            small.enqueue()
    assert small.enqueue().id


@pytest.fixture
def small(transactional_db: None) -> Any:
    """Return a task on a queue whose only place is taken."""
    with store.transaction() as tx:
        store.ensure_queue(tx, "small")
        store.set_limits(tx, "small", capacity=1, max_running=None)
    small = tasks.noop.using(queue_name="small")
    small.enqueue()
    return small


def make_room() -> None:
    with store.transaction() as tx:
        store.cancel(tx, list(Job.objects.values_list("pk", flat=True)))


def test_waiting_for_room_in_a_coroutine_keeps_no_thread_busy(small: Any) -> None:
    """The room is made by the very thread that a blocking wait would keep."""

    async def wait_and_make_room() -> Any:
        waiting = asyncio.ensure_future(small.using(wait_seconds=30).aenqueue())
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        assert not waiting.done()
        await sync_to_async(make_room)()
        return await waiting

    result = async_to_sync(wait_and_make_room)()
    assert Job.objects.get(pk=result.id).state == "ready"
    assert result.task.wait_seconds == 30


def test_waiting_in_a_coroutine_ends_with_the_refusal(small: Any) -> None:
    with pytest.raises(QueueFull):
        async_to_sync(small.using(wait_seconds=0.05).aenqueue)()
    with transaction.atomic(), pytest.raises(QueueFull):
        async_to_sync(small.using(wait_seconds=60).aenqueue)()
    assert Job.objects.count() == 1


# --- A queue that is not beside the rows -------------------------------------------------------

WITH_ROWS: dict[str, Any] = {"OPTIONS": {"enqueue_on_commit": "rows"}}


def add_row(rows: Any, name: str) -> None:
    with rows.cursor() as cursor:
        cursor.execute("INSERT INTO row VALUES (%s)", [name])


def count_rows(rows: Any) -> int:
    with rows.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM row")
        return int(cursor.fetchone()[0])


@every_way
def test_on_commit_writes_the_job_only_after_the_rows_are_committed(
    enqueue: Any, aliases: Aliases, rows: Any, bell: AnyBell, sent: list[Any]
) -> None:
    with aliases(default=WITH_ROWS):
        with transaction.atomic(using="rows"):
            add_row(rows, "kept")
            results = enqueue()
            assert not Job.objects.exists()
            assert (bell.clear(), sent) == (0, [])
        assert Job.objects.count() == len(results)
        assert bell.clear() == 1
        assert count_rows(rows) == 1


@every_way
def test_on_commit_without_a_transaction_writes_at_once(
    enqueue: Any, aliases: Aliases, rows: Any
) -> None:
    with aliases(default=WITH_ROWS):
        results = enqueue()
        assert all(result.id for result in results)
        assert jobs_seen_by_others() == len(results)


@every_way
def test_on_commit_drops_the_job_of_a_rolled_back_transaction_or_savepoint(
    enqueue: Any, aliases: Aliases, rows: Any, bell: AnyBell
) -> None:
    with aliases(default=WITH_ROWS):
        with rolled_back("rows"):
            (lost, *_) = enqueue()
        with transaction.atomic(using="rows"):
            with rolled_back("rows"):
                enqueue()
            kept = tasks.add.enqueue(1)
        assert [str(pk) for pk in Job.objects.values_list("pk", flat=True)] == [kept.id]
        assert bell.clear() == 1
        assert (lost.id, lost.enqueued_at) == ("", None)
        with pytest.raises(TaskResultDoesNotExist):
            lost.refresh()


def test_on_commit_the_result_is_filled_in_when_the_job_is_written(
    aliases: Aliases, rows: Any, sent: list[Any]
) -> None:
    with aliases(default=WITH_ROWS):
        backend: Any = task_backends["default"]
        with transaction.atomic(using="rows"):
            result = tasks.add.enqueue(1, right=2)
            many = backend.enqueue_many([tasks.add.bind(n) for n in range(3)])
            assert (result.id, result.enqueued_at, result.args) == ("", None, [1])
            assert result.status == TaskResultStatus.READY
            assert (len(many), many.ids, many[0].id) == (3, ["", "", ""], "")
        job = Job.objects.order_by("id").first()
        assert job is not None
        assert (result.id, result.enqueued_at) == (str(job.pk), job.created_at)
        assert [name for name, *_ in sent] == ["task_enqueued"]
        assert many[2].id == many.ids[2] == many[1:][1].id != ""
        assert run_pending() == 4
        result.refresh()
        assert result.return_value == 3


def test_on_commit_a_key_that_is_taken_gives_the_job_that_has_it(
    aliases: Aliases, rows: Any
) -> None:
    keyed = tasks.add.using(idempotency_key="once")
    first = keyed.enqueue(1, 2)
    run_pending()
    with aliases(default=WITH_ROWS):
        with transaction.atomic(using="rows"):
            again = keyed.enqueue(1, 2)
        assert (again.id, again.return_value) == (first.id, 3)


def test_on_commit_arguments_are_taken_and_refused_at_the_enqueue(
    aliases: Aliases, rows: Any
) -> None:
    with aliases(default=WITH_ROWS):
        changing = [1]
        with transaction.atomic(using="rows"):
            with pytest.raises(PayloadError):
                tasks.echo.enqueue(object())
            result = tasks.echo.enqueue(changing)
            changing.append(2)
        run_pending()
        result.refresh()
        assert result.return_value == [1]


def test_on_commit_a_full_queue_is_told_with_the_rows_committed(
    aliases: Aliases, rows: Any
) -> None:
    with store.transaction() as tx:
        store.ensure_queue(tx, "default")
        store.set_limits(tx, "default", capacity=1, max_running=None)
    with aliases(default=WITH_ROWS):
        block = transaction.atomic(using="rows")
        block.__enter__()
        add_row(rows, "kept")
        tasks.noop.enqueue()
        tasks.noop.enqueue()
        with pytest.raises(QueueFull):
            block.__exit__(None, None, None)
        assert count_rows(rows) == 1
        assert Job.objects.count() == 1


def test_on_commit_of_the_queues_own_database_is_the_plain_transaction(aliases: Aliases) -> None:
    with aliases(default={"OPTIONS": {"enqueue_on_commit": True}}):
        with transaction.atomic():
            assert tasks.noop.enqueue().id
            assert Job.objects.count() == 1
        with rolled_back():
            tasks.noop.enqueue()
        assert Job.objects.count() == 1


def test_on_commit_a_manual_transaction_is_refused(aliases: Aliases, rows: Any) -> None:
    with aliases(default=WITH_ROWS):
        rows.set_autocommit(False)
        try:
            with pytest.raises(transaction.TransactionManagementError):
                tasks.noop.enqueue()
        finally:
            rows.rollback()
            rows.set_autocommit(True)
    assert not Job.objects.exists()


def test_on_commit_in_a_test_case_the_commit_is_pretended(aliases: Aliases, rows: Any) -> None:
    with aliases(default=WITH_ROWS), rolled_back("rows"):
        with run_on_enqueue(), TestCase.captureOnCommitCallbacks(using="rows", execute=True):
            result = tasks.add.enqueue(1, 2)
        assert result.return_value == 3


@pytest.mark.parametrize("engine", ["sqlite"])
def test_a_queue_in_a_file_of_its_own_works_as_processes(tmp_path: Path) -> None:
    """Two files, a router, and the mode: what the documentation tells a project to write."""
    from tests.conformance.dedicated import Dedicated

    dedicated = Dedicated(tmp_path)
    dedicated.manage("migrate", "--verbosity", "0")
    dedicated.manage("migrate", "--verbosity", "0", "--database", "queue")
    out = dedicated.python(
        "from django.contrib.auth.models import Group\n"
        "from django.db import transaction\n"
        "from relay_queue.models import Job\n"
        "from tests import tasks\n"
        "with transaction.atomic():\n"
        "    Group.objects.create(name='kept')\n"
        "    result = tasks.create_group.enqueue('by the job')\n"
        "    print(Job.objects.count(), repr(result.id))\n"
        "try:\n"
        "    with transaction.atomic():\n"
        "        tasks.create_group.enqueue('never')\n"
        "        raise ZeroDivisionError\n"
        "except ZeroDivisionError: pass\n"
        "print(Job.objects.count(), result.id)\n"
    )
    assert out.splitlines() == ["0 ''", "1 1"]
    dedicated.manage("runworker", "--drain")
    groups = dedicated.python(
        "from django.contrib.auth.models import Group\n"
        "print(*sorted(Group.objects.values_list('name', flat=True)), sep=', ')\n"
    )
    assert groups.strip() == "by the job, kept"


@pytest.mark.parametrize("engine", ["sqlite"])
def test_helpers_for_tests_say_when_jobs_wait_for_a_commit(tmp_path: Path) -> None:
    from tests.conformance.dedicated import Dedicated

    out = Dedicated(tmp_path).manage("test", "--noinput", "tests.conformance.waiting")
    assert "Found 10 test(s)" in out
