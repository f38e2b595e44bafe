"""Running one job: whatever its function does is an outcome, and none takes the worker down."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from math import inf
from time import monotonic
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.utils import translation

from relay_queue import store
from relay_queue.backend import RelayBackend
from relay_queue.compat import TaskResultStatus, signals
from relay_queue.context import JobContext
from relay_queue.exceptions import PayloadError, ResultError
from relay_queue.models import Job, Lease
from relay_queue.payload import clean_text
from relay_queue.store.records import Claim
from relay_queue.worker import outcome
from relay_queue.worker.attempt import Attempt, Rules
from relay_queue.worker.executor import execute
from tests import tasks
from tests.conftest import wait_until
from tests.worker.claims import claim_next, claim_of, settle, stored_call

on_each_engine = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


@pytest.fixture(autouse=True)
def clean_notes() -> Iterator[None]:
    tasks.calls.clear()
    tasks.gate.clear()
    yield
    tasks.gate.set()


def run(claim: Claim, deadline: float | None = None) -> Attempt:
    context = JobContext.of(claim, "worker-1")
    context.deadline = deadline
    return execute(Attempt(claim, context))


@pytest.fixture
def no_log() -> Iterator[None]:
    """Log nothing: receivers log the very texts that not every test report can carry."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Signals:
    """Records the framework's signals as (name, status, id)."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.senders: set[type] = set()

    def started(self, sender: type, task_result: Any, **kwargs: Any) -> None:
        self._record("started", sender, task_result)

    def finished(self, sender: type, task_result: Any, **kwargs: Any) -> None:
        self._record("finished", sender, task_result)

    def _record(self, name: str, sender: type, result: Any) -> None:
        self.senders.add(sender)
        self.sent.append((name, result.status))
        self.result = result


@pytest.fixture
def sent() -> Iterator[Signals]:
    recorder = Signals()
    signals.task_started.connect(recorder.started)
    signals.task_finished.connect(recorder.finished)
    yield recorder
    signals.task_started.disconnect(recorder.started)
    signals.task_finished.disconnect(recorder.finished)


# --- Outcomes ------------------------------------------------------------------------------


def test_return_is_an_ack_with_the_result_as_json() -> None:
    claim = claim_of(tasks.add, 1, right=2)
    finished = run(claim)
    assert finished.claim is claim
    assert finished.settled is None
    assert finished.run_seconds >= 0
    settlement = finished.settlement
    assert (settlement.verb, settlement.result) == ("ack", "3")
    assert (settlement.lease_id, settlement.token) == (claim.lease_id, claim.token)
    assert run(claim_of(tasks.noop)).settlement.result == "null"


def test_exception_is_a_nack_with_class_line_and_traceback() -> None:
    settlement = run(claim_of(tasks.fail, "one\n two")).settlement
    assert (settlement.verb, settlement.fatal, settlement.timed_out) == ("nack", False, False)
    assert settlement.error == "builtins.ValueError"
    assert settlement.message == "ValueError: one two"
    assert settlement.delay_seconds is None
    assert "in fail\n" in settlement.traceback
    assert "executor" not in settlement.traceback


def test_wrong_arguments_are_a_failed_attempt() -> None:
    settlement = run(claim_of(tasks.add, 1, 2, 3, wrong=4)).settlement
    assert (settlement.verb, settlement.error) == ("nack", "builtins.TypeError")


@pytest.mark.parametrize(
    ("claim", "fatal"),
    [
        (claim_of(tasks.fatal), True),
        (claim_of(tasks.fatal_on_lookup, "key"), True),
        (claim_of(tasks.fatal_on_lookup, "value"), False),
        (claim_of(tasks.retry_on_connection, "connection"), False),
        (claim_of(tasks.retry_on_connection, "value"), True),
        (claim_of(tasks.fail), False),
    ],
)
def test_rules_of_the_task_say_what_is_fatal(claim: Claim, fatal: bool) -> None:
    assert run(claim).settlement.fatal is fatal


def test_retry_chooses_the_delay() -> None:
    settlement = run(claim_of(tasks.retry_later, 12.5)).settlement
    assert (settlement.verb, settlement.fatal, settlement.delay_seconds) == ("nack", False, 12.5)


def test_snooze_is_no_failure() -> None:
    settlement = run(claim_of(tasks.snooze, 7)).settlement
    assert (settlement.verb, settlement.delay_seconds, settlement.error) == ("snooze", 7.0, "")


@pytest.mark.parametrize("task", [tasks.retry_later, tasks.snooze])
@pytest.mark.parametrize("seconds", [-1, "soon", None, True, 1e12])
def test_impossible_delays_are_a_failed_attempt_that_says_so(task: Any, seconds: Any) -> None:
    settlement = run(claim_of(task, seconds)).settlement
    assert (settlement.verb, settlement.delay_seconds) == ("nack", None)
    assert "use seconds between 0 and" in settlement.message


@pytest.mark.parametrize("kind", ["set", "object", "nan", "huge"])
def test_results_that_cannot_be_stored_are_fatal(kind: str) -> None:
    settlement = run(claim_of(tasks.give_back, kind)).settlement
    assert (settlement.verb, settlement.fatal) == ("nack", True)
    assert settlement.error == "relay_queue.exceptions.ResultError"
    assert "result" in settlement.message


def test_deadline_seen_by_the_function_is_timed_out() -> None:
    settlement = run(claim_of(tasks.wait_until_cancelled), deadline=monotonic()).settlement
    assert (settlement.verb, settlement.timed_out, settlement.fatal) == ("nack", True, False)
    assert settlement.error == "relay_queue.exceptions.TimedOut"


def test_cancellation_seen_by_the_function_is_a_nack() -> None:
    claim = claim_of(tasks.wait_until_cancelled)
    context = JobContext.of(claim)
    context.cancel("by an operator")
    settlement = execute(Attempt(claim, context)).settlement
    assert (settlement.verb, settlement.timed_out) == ("nack", False)
    assert settlement.error == "relay_queue.exceptions.Cancelled"


def test_result_that_comes_after_the_deadline_is_still_told() -> None:
    assert run(claim_of(tasks.add, 1), deadline=monotonic()).settlement.verb == "ack"


# --- What cannot run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["os.system", "tests.tasks.plain", "tests.tasks.removed", "nowhere.add"],
)
def test_paths_that_are_no_task_are_fatal_and_nothing_is_called(path: str) -> None:
    settlement = run(stored_call(path, '{"args":["true"],"kwargs":{}}')).settlement
    assert (settlement.verb, settlement.fatal) == ("nack", True)
    assert settlement.error == "relay_queue.exceptions.UnknownTask"
    assert path in settlement.message


@pytest.mark.parametrize("text", ["", "[", "[]", '{"args":1,"kwargs":{}}', '{"args":[NaN]}'])
def test_payload_that_does_not_decode_is_fatal(text: str) -> None:
    settlement = run(stored_call("tests.tasks.note", text)).settlement
    assert (settlement.verb, settlement.fatal) == ("nack", True)
    assert settlement.error == "relay_queue.exceptions.PayloadError"
    assert tasks.calls == []


# --- Poison --------------------------------------------------------------------------------


POISON_CLAIMS = [
    claim_of(tasks.poison, "recursion"),
    *(claim_of(task, kind) for task in (tasks.poison, tasks.poison_async) for kind in tasks.POISON),
]


@pytest.mark.parametrize("claim", POISON_CLAIMS, ids=lambda claim: f"{claim.task}-{claim.payload}")
def test_whatever_is_raised_is_a_failed_attempt_with_storable_texts(
    claim: Claim, no_log: None
) -> None:
    settlement = run(claim).settlement
    assert (settlement.verb, settlement.fatal) == ("nack", False)
    assert settlement.error
    for text, limit in [
        (settlement.error, 255),
        (settlement.message, 500),
        (settlement.traceback, 32_768),
    ]:
        assert clean_text(text, limit) == text
    assert "\n" not in settlement.message


def test_error_text_of_50_megabytes_is_bounded(no_log: None) -> None:
    settlement = run(claim_of(tasks.fail_at_length, 50_000_000)).settlement
    assert settlement.message.startswith("ValueError: xxx")
    assert (len(settlement.message), len(settlement.traceback)) == (500, 32_768)


def test_class_that_will_not_tell_its_name_is_named_anyway(no_log: None) -> None:
    settlement = run(claim_of(tasks.poison, "anonymous")).settlement
    assert settlement.error == "tests.tasks.Anonymous"
    assert settlement.message == "Anonymous: who"


@on_each_engine
@pytest.mark.parametrize("kind", tasks.POISON)
def test_poison_is_stored_and_charged(kind: str, no_log: None) -> None:
    result = tasks.poison.enqueue(kind)
    (claim,) = claim_next()
    assert settle(run(claim).settlement).accepted
    job = Job.objects.get(pk=result.id)
    assert (job.state, job.attempt) == ("retrying", 1)
    assert job.last_error


# --- Context -------------------------------------------------------------------------------


def test_context_tells_the_function_about_its_job() -> None:
    claim = claim_of(tasks.describe, note="n")
    assert json.loads(run(claim).settlement.result or "") == {
        "job_id": claim.job_id,
        "attempt": 1,
        "epoch": claim.lease_id,
        "key": "key",
        "same": True,
        "result_id": str(claim.job_id),
        "note": "n",
    }


def test_context_variables_end_with_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def speak_german() -> None:
        translation.activate("de")
        seen.append(translation.get_language())

    monkeypatch.setattr("tests.tasks.noop", _replaced(tasks.noop, speak_german))
    before = translation.get_language()
    assert run(claim_of(tasks.noop)).settlement.verb == "ack"
    assert seen == ["de"]
    assert translation.get_language() == before


def _replaced(task: Any, function: Any) -> Any:
    """Return the task with another function behind the same path."""
    from relay_queue.task import resolve
    from relay_queue.worker.executor import _plan

    function.__module__, function.__qualname__ = task.func.__module__, task.func.__qualname__
    resolve.cache_clear()
    _plan.cache_clear()
    return dataclasses.replace(task, func=function)


# --- Signals -------------------------------------------------------------------------------


def test_signals_tell_start_and_success(sent: Signals) -> None:
    run(claim_of(tasks.add, 1, 2))
    assert sent.sent == [
        ("started", TaskResultStatus.RUNNING),
        ("finished", TaskResultStatus.SUCCESSFUL),
    ]
    assert sent.senders == {RelayBackend}
    assert sent.result.return_value == 3
    assert sent.result.worker_ids == ["worker-1"]


def test_failure_with_attempts_left_is_ready_again_and_the_last_is_failed(sent: Signals) -> None:
    claim = claim_of(tasks.fail)
    run(claim)
    assert sent.sent[-1] == ("finished", TaskResultStatus.READY)
    assert not sent.result.is_finished
    run(dataclasses.replace(claim, attempt=3, attempts_left=0))
    assert sent.sent[-1] == ("finished", TaskResultStatus.FAILED)
    assert sent.result.errors[0].exception_class is ValueError
    assert sent.result.attempts == 3


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_failing_receivers_do_not_change_the_outcome(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**kwargs: Any) -> None:
        raise error("receiver")

    for signal in (signals.task_started, signals.task_finished):
        signal.connect(broken)
    try:
        assert run(claim_of(tasks.add, 1)).settlement.verb == "ack"
        assert run(claim_of(tasks.fail)).settlement.message == "ValueError: no"
    finally:
        for signal in (signals.task_started, signals.task_finished):
            signal.disconnect(broken)
    assert "receiver" in caplog.text


class BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("in the log handler")


def test_failing_log_handlers_do_not_change_the_outcome() -> None:
    handler = BrokenHandler()
    logging.getLogger().addHandler(handler)
    try:
        assert run(claim_of(tasks.fail)).settlement.message == "ValueError: no"
        unknown = run(stored_call("tests.tasks.removed", '{"args":[],"kwargs":{}}'))
        assert unknown.settlement.fatal
    finally:
        logging.getLogger().removeHandler(handler)


def test_receivers_find_the_exception_that_is_being_handled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        run(dataclasses.replace(claim_of(tasks.fail), attempts_left=0))
    assert "ValueError: no" in caplog.text


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", "will be tried again: ValueError: no"),
        ("cancelled", "stopped after its lease had ended (cancelled): ValueError: no"),
    ],
)
def test_the_log_says_whether_a_failure_will_be_tried_again(
    caplog: pytest.LogCaptureFixture, reason: str, said: str
) -> None:
    claim = claim_of(tasks.fail)
    context = JobContext.of(claim)
    context.cancel_reason = reason
    execute(Attempt(claim, context))
    assert f"job {claim.job_id} (tests.tasks.fail) {said}" in caplog.messages


def own_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, bool]]:
    """Return what Relay's own lines said: level, text, and whether a traceback came along."""
    return [
        (record.levelname, record.getMessage(), bool(record.exc_info))
        for record in caplog.records
        if record.name.startswith("relay_queue.")
    ]


@pytest.mark.parametrize("framework_logs", [True, False])
@pytest.mark.parametrize(
    ("function", "attempts_left", "why"),
    [
        (tasks.fail, 0, "attempt 1 was its last: ValueError: no"),
        (tasks.fail_async, 0, "attempt 1 was its last: ValueError: no"),
        (tasks.fatal, 2, "its failure is fatal: Fatal: give up"),
    ],
)
def test_the_log_has_one_error_with_the_last_failure_of_a_job(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    attempts_left: int,
    why: str,
    framework_logs: bool,
) -> None:
    monkeypatch.setattr(signals.logger, "disabled", not framework_logs)
    claim = dataclasses.replace(claim_of(function), attempts_left=attempts_left)
    assert run(claim).settlement.death_logged
    level = "WARNING" if framework_logs else "ERROR"
    line = f"job {claim.job_id} ({claim.task}) will not be tried again, since {why}"
    assert own_lines(caplog) == [(level, line, not framework_logs)]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info


def test_a_job_that_can_never_run_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    claim = stored_call("tests.tasks.removed", '{"args":[],"kwargs":{}}')
    assert run(claim).settlement.death_logged
    ((level, line, has_traceback),) = own_lines(caplog)
    assert (level, has_traceback) == ("ERROR", True)
    assert line.startswith(
        f"job {claim.job_id} (tests.tasks.removed) will not be tried again, since its failure is "
        "fatal: UnknownTask: "
    )


# --- Coroutines ----------------------------------------------------------------------------


def test_coroutine_function_runs_to_its_result() -> None:
    assert run(claim_of(tasks.add_async, 1, 2)).settlement.result == "3"
    assert run(claim_of(tasks.fail_async)).settlement.message == "ValueError: no"


def test_coroutine_is_cancelled_at_its_deadline() -> None:
    settlement = run(claim_of(tasks.sleep_async, 60), deadline=monotonic() + 0.01).settlement
    assert (settlement.timed_out, settlement.error) == (True, "relay_queue.exceptions.TimedOut")


@on_each_engine
def test_coroutine_may_use_the_database() -> None:
    Group.objects.create(name="one")
    assert run(claim_of(tasks.count_groups)).settlement.result == "1"


# --- atomic=True ---------------------------------------------------------------------------


def atomic_claim(**options: Any) -> Claim:
    tasks.create_group_atomically.enqueue("group", **options)
    (claim,) = claim_next()
    return claim


@on_each_engine
def test_atomic_function_and_its_ack_commit_together() -> None:
    claim = atomic_claim()
    finished = run(claim)
    assert finished.settled is not None
    assert finished.settled.accepted
    job = Job.objects.get(pk=claim.job_id)
    assert (job.state, Group.objects.get().name) == ("succeeded", "group")
    assert job.result == str(Group.objects.get().pk)
    assert tasks.calls == ["committed group"]


@on_each_engine
def test_failed_atomic_function_leaves_nothing_behind() -> None:
    claim = atomic_claim(then="fail")
    finished = run(claim)
    assert finished.settled is None
    assert finished.settlement.message == "ValueError: after the write"
    assert not Group.objects.exists()
    assert tasks.calls == []
    assert settle(finished.settlement).state == "retrying"


@on_each_engine
def test_atomic_function_whose_lease_has_ended_is_not_run() -> None:
    claim = atomic_claim()
    with store.transaction() as tx:
        store.cancel(tx, [claim.job_id])
    finished = run(claim)
    assert finished.settled is None
    assert "the lease ended" in finished.settlement.message
    assert not Group.objects.exists()
    assert not settle(finished.settlement).accepted
    assert Lease.objects.get().refused_verb == "release"


@contextmanager
def writer_taken_until(freed: threading.Event) -> Iterator[None]:
    """Keep the writer, from a connection of another thread, as siblings and other programs do."""
    taken = threading.Event()

    def keep() -> None:
        with store.transaction():
            taken.set()
            freed.wait(60)
        connection.close()

    thread = threading.Thread(target=keep)
    thread.start()
    taken.wait(60)
    try:
        yield
    finally:
        freed.set()
        thread.join()


@pytest.mark.django_db(transaction=True)
def test_the_time_limit_of_an_atomic_function_begins_once_the_writer_is_won() -> None:
    claim = atomic_claim()
    claim.timeout_seconds = 0.5
    context = JobContext.of(claim)
    overdue: list[float] = []
    freed = threading.Event()

    def free() -> None:
        wait_until(lambda: context.timed_out)
        overdue.append(context.overdue_from)
        freed.set()

    freeing = threading.Thread(target=free)
    with writer_taken_until(freed):
        freeing.start()
        finished = execute(Attempt(claim, context))
    freeing.join()
    assert finished.settled is not None
    assert finished.settled.accepted
    assert overdue == [inf], "the loop must not judge what has not begun"
    assert context.overdue_from < inf


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("why", ["told to stop", "waited for the length of its lease"])
def test_an_atomic_function_that_cannot_begin_gives_its_job_back_uncharged(
    why: str, monkeypatch: pytest.MonkeyPatch, sent: Signals
) -> None:
    claim = atomic_claim()
    context = JobContext.of(claim)
    monkeypatch.setattr("relay_queue.worker.executor.WRITER_SLICE_SECONDS", 0.05)
    if why == "told to stop":
        context.cancel(why)
    else:
        claim.lease_seconds = 0.1
    with writer_taken_until(threading.Event()):
        finished = execute(Attempt(claim, context))
    assert finished.settlement.verb == "release"
    assert "could not be had" in finished.settlement.message
    assert settle(finished.settlement).state == "ready"
    job = Job.objects.get()
    assert (job.attempt, job.last_error) == (0, "")
    assert sent.sent[-1] == ("finished", TaskResultStatus.READY)
    assert not Group.objects.exists()


@on_each_engine
def test_refused_ack_takes_the_writes_of_an_atomic_function_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = atomic_claim()
    # The lease may end between the first look and the ack, if the clock jumps.
    monkeypatch.setattr("relay_queue.worker.executor._require_lease", lambda *_: None)
    with store.transaction() as tx:
        store.cancel(tx, [claim.job_id])
    finished = run(claim)
    assert finished.settled is None
    assert (finished.settlement.verb, finished.settlement.error) == (
        "nack",
        "relay_queue.exceptions.Cancelled",
    )
    assert not Group.objects.exists()
    assert Job.objects.get().state == "cancelled"


@on_each_engine
def test_atomic_function_past_its_deadline_is_rolled_back() -> None:
    claim = atomic_claim(then="wait")
    claim.timeout_seconds = 0.04
    finished = run(claim)
    assert finished.settled is None
    assert finished.settlement.timed_out
    assert not Group.objects.exists()


@on_each_engine
def test_failing_commit_hook_does_not_undo_the_success(caplog: pytest.LogCaptureFixture) -> None:
    finished = run(atomic_claim(then="hook"))
    assert finished.settled is not None
    assert finished.settlement.verb == "ack"
    assert Group.objects.exists()
    assert "commit hook failed" in caplog.text
    assert not connection.in_atomic_block


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (b"text", '"text"'),
        ((1, 2), "[1,2]"),
        (range(2), "[0,1]"),
        (deque([1]), "[1]"),
        ({1: 2}, '{"1":2}'),
        ({"a": [{None: b"x", 1.5: {True: ()}}]}, '{"a":[{"1.5":{"true":[]},"null":"x"}]}'),
    ],
)
def test_a_result_is_taken_as_the_framework_takes_it(value: Any, stored: str) -> None:
    assert outcome.success(claim_of(tasks.noop), value).result == stored


def test_a_result_that_nobody_takes_is_refused_with_the_path_of_the_very_value() -> None:
    with pytest.raises(ResultError, match=r"^result\['b'\]\['1'\]\[0\] is of type date") as refusal:
        outcome.success(claim_of(tasks.noop), {"a": b"fine", "b": {1: [date(2026, 1, 2)]}})
    assert refusal.value.path == "result['b']['1'][0]"


@pytest.mark.parametrize(
    ("retry_on", "is_fatal"),
    [((), True), ((Exception,), True), ((ResultError,), False), ((PayloadError,), False)],
)
def test_a_result_that_cannot_be_stored_is_tried_again_only_if_the_task_says_so(
    retry_on: tuple[type[Exception], ...], is_fatal: bool
) -> None:
    assert Rules(retry_on).are_fatal(ResultError) is is_fatal
    assert not Rules().are_fatal(PayloadError), "that of an enqueue in the function"


@on_each_engine
def test_a_function_whose_result_cannot_be_stored_runs_once() -> None:
    result = tasks.give_back.using(max_attempts=5).enqueue("set")
    (claim,) = claim_next()
    assert settle(run(claim).settlement).state == "dead"
    job = Job.objects.get(pk=result.id)
    assert (job.state, job.attempt) == ("dead", 1)
    assert job.last_error.startswith("ResultError: result is of type set")
