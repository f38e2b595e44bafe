"""Enqueue: what is written, what is refused, and that a refusal writes nothing."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from relay_queue import conf, store
from relay_queue.backoff import Backoff
from relay_queue.exceptions import (
    IdempotencyConflict,
    InvalidJob,
    PayloadError,
    QueueFull,
    UnknownQueue,
)
from relay_queue.models import Job, Lease, Queue
from relay_queue.operations import CANCEL
from relay_queue.ranking import rank
from tests.store.actions import (
    START,
    TASK,
    Wall,
    ack,
    after,
    assert_counters_exact,
    atomic,
    claim,
    claim_one,
    connection,
    counted,
    do,
    enqueue,
    job,
    nothing_written,
    read,
    rolled_back,
    rows,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


def limit(queue: str = "default", capacity: int | None = None, running: int | None = None) -> None:
    do(store.set_limits, queue, capacity=capacity, max_running=running)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_new_job_is_ready_now_with_the_defaults_of_the_project() -> None:
    answer = do(store.enqueue, job(args=[1, "two"], kwargs={"three": None}))
    stored = read(answer.job_id)
    settings = conf.get()
    assert (answer.created, answer.state, answer.created_at) == (True, "ready", START)
    assert (stored.queue, stored.backend, stored.task) == ("default", "default", TASK)
    assert json.loads(stored.payload) == {"args": [1, "two"], "kwargs": {"three": None}}
    assert (stored.state, stored.priority, stored.idempotency_key) == ("ready", 0, None)
    assert (stored.attempt, stored.attempt_base, stored.losses) == (0, 0, 0)
    assert stored.max_attempts == settings.max_attempts
    assert stored.lease_seconds == settings.lease_seconds
    assert stored.timeout_seconds is None
    assert stored.backoff_base_seconds == settings.backoff_base_seconds
    assert stored.backoff_max_seconds == settings.backoff_max_seconds
    assert stored.backoff_jitter == settings.backoff_jitter
    assert (stored.created_at, stored.available_at) == (START, START)
    assert (stored.started_at, stored.finished_at, stored.result) == (None, None, None)
    assert stored.last_error == ""
    assert not rows(Lease).exists()


def test_every_option_of_a_job_is_stored_as_given() -> None:
    stored = read(
        enqueue(
            queue="mail",
            backend="other",
            priority=-100,
            idempotency_key="k",
            max_attempts=7,
            lease_seconds=12.5,
            timeout_seconds=3.25,
            backoff=Backoff(0.5, 8.0, "full"),
        )
    )
    assert (stored.queue, stored.backend, stored.priority) == ("mail", "other", -100)
    assert (stored.idempotency_key, stored.max_attempts) == ("k", 7)
    assert (stored.lease_seconds, stored.timeout_seconds) == (12.5, 3.25)
    assert (stored.backoff_base_seconds, stored.backoff_max_seconds) == (0.5, 8.0)
    assert stored.backoff_jitter == "full"


def test_a_job_enqueued_one_by_one_and_in_a_batch_has_the_same_columns() -> None:
    options = {
        "args": [0.1, 1e300, 2**70, 'quote " and \\ and \u2028 and \x00', {"ключ": "值"}],
        "queue": "mail",
        "priority": 3,
        "lease_seconds": 12.3,
        "timeout_seconds": 0.1,
        "backoff": Backoff(0.1, 0.7, "full"),
        "run_after": after(33.333333),
    }
    first = enqueue(**options)
    (second,) = do(store.enqueue_many, [job(**options)])
    one, many = (rows(Job).filter(pk=pk).values().get() for pk in (first, second.job_id))
    assert one | {"id": 0} == many | {"id": 0}


def test_a_job_for_later_is_scheduled_and_not_claimable_before_its_time(wall: Wall) -> None:
    job_id = enqueue(run_after=after(10))
    assert (state(job_id), read(job_id).available_at) == ("scheduled", after(10))
    wall.advance(9.999999)
    assert do(store.promote) == {}
    assert claim(5) == []
    wall.advance(0.000001)
    assert do(store.promote) == {"default": 1}
    assert claim_one().job_id == job_id


@pytest.mark.parametrize("seconds", [0, -1, -1e9])
def test_a_run_after_that_is_not_in_the_future_counts_as_now(seconds: float) -> None:
    job_id = enqueue(run_after=START + timedelta(seconds=seconds))
    assert (state(job_id), read(job_id).available_at) == ("ready", START)


def test_an_old_run_after_buys_no_place_ahead_of_those_who_wait(wall: Wall) -> None:
    waiting = enqueue()
    wall.advance(1)
    enqueue(run_after=datetime.min.replace(tzinfo=UTC))
    assert claim_one().job_id == waiting


def test_a_run_after_in_another_time_zone_means_the_same_moment(wall: Wall) -> None:
    east = timezone(timedelta(hours=14))
    job_id = enqueue(run_after=after(60).astimezone(east))
    assert read(job_id).available_at == after(60)
    (many,) = do(store.enqueue_many, [job(run_after=after(60).astimezone(east))])
    assert read(many.job_id).available_at == after(60)
    wall.advance(60)
    assert do(store.promote) == {"default": 2}


# --- refusals ----------------------------------------------------------------------------------

PAYLOAD_FAULTS = {
    "too large": {"args": ["x" * 1_048_576]},
    "not JSON": {"args": [object()]},
    "bytes": {"args": [b"x"]},
    "a set": {"kwargs": {"k": {1}}},
    "a decimal": {"args": [Decimal("1.5")]},
    "a date": {"args": [START]},
    "NaN": {"args": [math.nan]},
    "infinity": {"kwargs": {"a": [-math.inf]}},
    "a number as key": {"args": [{1: 2}]},
    "None as key": {"args": [{None: 2}]},
    "a number as keyword": {"kwargs": {1: 2}},
    "200 levels deep": {"args": [deep(200)]},
    "100,000 levels deep": {"args": [deep(100_000)]},
    "a 5,000-digit integer": {"args": [10**5000]},
    "a 5,000-digit negative integer": {"kwargs": {"n": -(10**5000)}},
    "a lone surrogate": {"args": ["\ud800"]},
    "a lone surrogate as key": {"args": [{"\udfff": 1}]},
}


@pytest.mark.parametrize("options", PAYLOAD_FAULTS.values(), ids=PAYLOAD_FAULTS.keys())
def test_a_payload_that_is_not_storable_json_is_refused(options: dict[str, Any]) -> None:
    with nothing_written(), pytest.raises(PayloadError) as refused:
        do(store.enqueue, job(**options))
    assert len(str(refused.value)) < 500, "an error must not repeat a megabyte"


def test_a_list_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with nothing_written(), pytest.raises(PayloadError):
        enqueue(args=[circle])


def test_a_payload_error_names_the_path_of_the_value() -> None:
    with pytest.raises(PayloadError) as refused:
        job(kwargs={"users": [1, 2, {"age": math.nan}]})
    assert refused.value.path == "kwargs['users'][2]['age']"


LATE = datetime.max.replace(tzinfo=UTC)

VALUE_FAULTS: dict[str, dict[str, Any]] = {
    "priority 101": {"priority": 101},
    "priority -101": {"priority": -101},
    "priority as text": {"priority": "1"},
    "priority as float": {"priority": 1.0},
    "priority as boolean": {"priority": True},
    "priority None": {"priority": None},
    "naive run_after": {"run_after": datetime(2027, 1, 1)},
    "run_after as text": {"run_after": "2027-01-01T00:00:00Z"},
    "run_after as number": {"run_after": 60},
    "run_after as timedelta": {"run_after": timedelta(seconds=60)},
    "run_after datetime.max": {"run_after": LATE},
    "run_after datetime.max west": {
        "run_after": LATE.replace(tzinfo=timezone(-timedelta(hours=12)))
    },
    "run_after datetime.max east": {
        "run_after": LATE.replace(tzinfo=timezone(timedelta(hours=12)))
    },
    "lease too long": {"lease_seconds": 86_400.1},
    "lease too short": {"lease_seconds": 0.999},
    "lease zero": {"lease_seconds": 0},
    "lease negative": {"lease_seconds": -60},
    "lease infinite": {"lease_seconds": math.inf},
    "lease NaN": {"lease_seconds": math.nan},
    "lease as text": {"lease_seconds": "60"},
    "lease as boolean": {"lease_seconds": True},
    "lease as decimal": {"lease_seconds": Decimal(60)},
    "timeout zero": {"timeout_seconds": 0},
    "timeout negative": {"timeout_seconds": -1},
    "timeout infinite": {"timeout_seconds": math.inf},
    "timeout NaN": {"timeout_seconds": math.nan},
    "timeout as text": {"timeout_seconds": "1"},
    "max_attempts 0": {"max_attempts": 0},
    "max_attempts negative": {"max_attempts": -1},
    "max_attempts above the limit": {"max_attempts": 1001},
    "max_attempts as float": {"max_attempts": 3.0},
    "max_attempts as boolean": {"max_attempts": True},
    "empty queue": {"queue": ""},
    "long queue": {"queue": "q" * 101},
    "queue with NUL": {"queue": "a\x00b"},
    "queue with a surrogate": {"queue": "a\ud800"},
    "queue as number": {"queue": 1},
    "queue None": {"queue": None},
    "empty task": {"task": ""},
    "long task": {"task": "t" * 256},
    "task as function": {"task": len},
    "task with a surrogate": {"task": "\udc00"},
    "empty backend": {"backend": ""},
    "long backend": {"backend": "b" * 101},
    "backend None": {"backend": None},
    "empty key": {"idempotency_key": ""},
    "long key": {"idempotency_key": "k" * 256},
    "key as number": {"idempotency_key": 7},
    "key with NUL": {"idempotency_key": "\x00"},
    "key with a surrogate": {"idempotency_key": "\ud83d"},
}


@pytest.mark.parametrize("options", VALUE_FAULTS.values(), ids=VALUE_FAULTS.keys())
def test_a_value_out_of_its_bounds_is_refused_and_named(options: dict[str, Any]) -> None:
    (name,) = options
    with nothing_written(), pytest.raises(InvalidJob, match=name):
        do(store.enqueue, job(**options))


def test_a_time_beyond_the_setting_is_refused_and_the_setting_named(settings: Any) -> None:
    settings.RELAY = {**settings.RELAY, "MAX_DEFER_SECONDS": 60}
    assert do(store.enqueue, job(run_after=after(60))).created
    with nothing_written(), pytest.raises(InvalidJob, match=r'RELAY\["MAX_DEFER_SECONDS"\]'):
        do(store.enqueue, job(run_after=after(61)))


HUGE = 10**5000

HUGE_FAULTS: dict[str, dict[str, Any]] = {
    "priority": {"priority": HUGE},
    "max_attempts": {"max_attempts": HUGE},
    "lease_seconds": {"lease_seconds": HUGE},
    "timeout_seconds": {"timeout_seconds": 10**400},
}


@pytest.mark.parametrize("options", HUGE_FAULTS.values(), ids=HUGE_FAULTS.keys())
def test_a_number_too_big_to_print_is_refused_like_any_other(options: dict[str, Any]) -> None:
    (name,) = options
    with nothing_written(), pytest.raises(InvalidJob, match=name):
        do(store.enqueue, job(**options))


BACKOFF_FAULTS = [
    (-1.0, 300.0, "none"),
    (1.0, math.inf, "none"),
    (math.nan, 300.0, "none"),
    (10.0, 1.0, "none"),
    (1.0, 10.0, "some"),
    ("1", 10.0, "none"),
    (1.0, 1e10, "none"),
]


@pytest.mark.parametrize("values", BACKOFF_FAULTS)
def test_a_back_off_that_makes_no_delay_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidJob):
        Backoff(*values)


SHAPE_FAULTS: dict[str, dict[str, Any]] = {
    "args as text": {"args": "hello"},
    "args as dictionary": {"args": {"a": 1}},
    "args as number": {"args": 5},
    "kwargs as list": {"kwargs": [1]},
    "backoff as number": {"backoff": 5},
}


@pytest.mark.parametrize("options", SHAPE_FAULTS.values(), ids=SHAPE_FAULTS.keys())
def test_arguments_of_the_wrong_shape_are_refused(options: dict[str, Any]) -> None:
    with nothing_written(), pytest.raises(InvalidJob):
        do(store.enqueue, job(**options))


@pytest.mark.parametrize("name", ["a,b", " a", "a ", "a\nb", "\t"])
def test_a_queue_name_that_no_command_can_spell_is_refused(name: str) -> None:
    with nothing_written(), pytest.raises(InvalidJob):
        enqueue(queue=name)


class Names(str, enum.Enum):  # noqa: UP042 - what many projects have, and formats otherwise
    MAIL = "mail"


@pytest.mark.parametrize("option", ["queue", "task", "backend", "idempotency_key"])
def test_a_member_of_a_string_enumeration_is_the_string_that_it_equals(option: str) -> None:
    job_id = enqueue(**{option: Names.MAIL})
    assert getattr(read(job_id), option) == "mail"
    assert [c.job_id for c in claim(1, read(job_id).queue)] == [job_id]


def test_a_priority_of_an_integer_enumeration_is_its_number() -> None:
    class Classes(enum.IntEnum):
        SOON = 5

    assert read(enqueue(priority=Classes.SOON)).priority == 5


def test_an_unknown_queue_is_refused_with_the_known_ones_in_the_message(settings: Any) -> None:
    settings.RELAY = {**settings.RELAY, "QUEUES": ["mail", "reports"]}
    with nothing_written(), pytest.raises(UnknownQueue, match="mail, reports"):
        enqueue(queue="mial")
    assert state(enqueue(queue="mail")) == "ready"


def test_a_prepared_job_of_a_queue_that_the_settings_no_longer_list_is_refused(
    settings: Any,
) -> None:
    prepared = job(queue="gone")
    settings.RELAY = {**settings.RELAY, "QUEUES": ["mail"]}
    with nothing_written(), pytest.raises(UnknownQueue):
        do(store.enqueue, prepared)


def test_a_queue_is_created_on_first_use_with_the_limits_of_the_settings(settings: Any) -> None:
    options = {"capacity": 5, "max_running": 2, "aging_seconds": None}
    settings.RELAY = {**settings.RELAY, "QUEUES": {"mail": options}}
    enqueue(queue="mail")
    stored = rows(Queue).get(pk="mail")
    assert (stored.capacity, stored.max_running, stored.aging_seconds) == (5, 2, None)
    assert (stored.created_at, stored.paused_at) == (START, None)


# --- idempotency -------------------------------------------------------------------------------


def test_the_same_key_and_call_returns_the_first_job(wall: Wall) -> None:
    first = do(store.enqueue, job(idempotency_key="k", args=[1]))
    wall.advance(5)
    again = do(store.enqueue, job(idempotency_key="k", args=[1], priority=9, max_attempts=1))
    assert (again.job_id, again.created, again.created_at) == (first.job_id, False, START)
    assert rows(Job).count() == 1
    assert_counters_exact()


@pytest.mark.parametrize("other", [{"args": [2]}, {"task": "another.task"}, {"kwargs": {"a": 1}}])
def test_the_same_key_with_another_call_is_a_conflict_that_names_the_job(
    other: dict[str, Any],
) -> None:
    first = enqueue(idempotency_key="k", args=[1])
    with nothing_written(), pytest.raises(IdempotencyConflict) as conflict:
        enqueue(**{"idempotency_key": "k", "args": [1], **other})
    assert conflict.value.job_id == first


def test_a_key_is_held_by_its_queue_alone() -> None:
    assert enqueue(idempotency_key="k") != enqueue(idempotency_key="k", queue="mail")


def test_arguments_are_compared_as_canonical_text() -> None:
    first = enqueue(idempotency_key="k", kwargs={"a": 1, "b": [1, 2]})
    assert enqueue(idempotency_key="k", kwargs={"b": (1, 2), "a": 1}) == first
    with pytest.raises(IdempotencyConflict):
        enqueue(idempotency_key="k", kwargs={"a": 1.0, "b": [1, 2]})


@pytest.mark.parametrize("end", ["ack", "dead", "cancel"])
def test_a_key_holds_in_every_state_until_its_job_is_pruned(end: str, wall: Wall) -> None:
    first = enqueue(idempotency_key="k")
    if end == "cancel":
        do(CANCEL.change_one, first)
    else:
        held = claim_one()
        assert enqueue(idempotency_key="k") == first
        do(store.ack, held.lease_id, held.token) if end == "ack" else do(
            store.nack, held.lease_id, held.token, fatal=True
        )
    assert enqueue(idempotency_key="k") == first
    wall.advance(1)
    finished = read(first)
    assert do(store.prune, finished.state, wall.now).jobs == 1
    assert do(store.enqueue, job(idempotency_key="k")).created


def test_a_key_that_is_taken_returns_its_job_even_when_the_queue_is_full() -> None:
    limit(capacity=1)
    first = enqueue(idempotency_key="k")
    assert enqueue(idempotency_key="k") == first


def test_keys_differ_by_case_and_by_every_character() -> None:
    keys = ["k", "K", "k ", "ké", "ke\u0301", "k%", "k_", "'", '"', "k\\", "?", "%s"]
    ids = [enqueue(idempotency_key=key) for key in keys]
    assert len(set(ids)) == len(keys)
    assert [enqueue(idempotency_key=key) for key in keys] == ids


# --- capacity ----------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_its_capacity_in_the_message() -> None:
    limit(capacity=2)
    enqueue()
    enqueue(run_after=after(60))
    with nothing_written(), pytest.raises(QueueFull, match="admits 2") as full:
        enqueue()
    assert (full.value.queue, full.value.capacity) == ("default", 2)


def test_capacity_counts_every_unfinished_state_and_no_finished_one(wall: Wall) -> None:
    limit(capacity=4)
    enqueue()
    held = claim_one()
    do(store.nack, held.lease_id, held.token)  # retrying
    enqueue()
    claim_one()  # running
    enqueue(run_after=after(60))  # scheduled
    enqueue()  # ready
    with pytest.raises(QueueFull):
        enqueue()
    done = claim_one()
    with pytest.raises(QueueFull):
        enqueue()
    ack(done)
    enqueue()
    with pytest.raises(QueueFull):
        enqueue()


def test_capacity_zero_admits_nothing() -> None:
    limit(capacity=0)
    with nothing_written(), pytest.raises(QueueFull):
        enqueue()


def test_a_capacity_below_what_is_there_keeps_the_jobs_and_admits_no_more() -> None:
    first = enqueue()
    enqueue()
    limit(capacity=1)
    ack(claim_one())
    assert state(first) == "succeeded"
    with pytest.raises(QueueFull):
        enqueue()
    ack(claim_one())
    enqueue()


def test_other_queues_have_room_while_one_is_full() -> None:
    limit(capacity=1)
    enqueue()
    assert state(enqueue(queue="mail")) == "ready"


def test_two_enqueues_in_one_transaction_do_not_exceed_the_capacity() -> None:
    limit(capacity=1)
    with nothing_written(), rolled_back() as tx:
        store.enqueue(tx, job())
        with pytest.raises(QueueFull):
            store.enqueue(tx, job())


def test_room_given_back_earlier_in_the_same_transaction_can_be_used() -> None:
    limit(capacity=1)
    enqueue()
    held = claim_one()
    with store.transaction() as tx:
        store.ack(tx, held.lease_id, held.token)
        store.enqueue(tx, job())
    assert counted() == {("default", "succeeded"): 1, ("default", "ready"): 1}


def test_two_joined_enqueues_in_one_outer_transaction_do_not_exceed_the_capacity() -> None:
    limit(capacity=1)
    with atomic():
        enqueue()
        with pytest.raises(QueueFull):
            enqueue()
    assert rows(Job).count() == 1


def test_a_waiting_enqueue_gives_up_with_queue_full_when_its_time_is_over() -> None:
    limit(capacity=1)
    enqueue()
    with nothing_written(), pytest.raises(QueueFull):
        store.enqueue_waiting(job(), 0.06)


def test_a_waiting_enqueue_inside_atomic_does_not_wait() -> None:
    limit(capacity=1)
    enqueue()
    with pytest.raises(QueueFull), no_sleep(), atomic():
        store.enqueue_waiting(job(), 3600)


@contextmanager
def no_sleep() -> Iterator[None]:
    def refuse(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", refuse)
        yield


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "1", None, True])
def test_a_waiting_time_that_is_no_duration_is_refused(seconds: Any) -> None:
    with nothing_written(), pytest.raises(InvalidJob, match="wait_seconds"):
        store.enqueue_waiting(job(), seconds)


# --- batches -----------------------------------------------------------------------------------


def test_an_empty_batch_does_nothing() -> None:
    with nothing_written():
        assert do(store.enqueue_many, []) == []


def test_a_batch_answers_in_its_own_order_with_ids_that_grow() -> None:
    jobs = [job(args=[n], queue=f"q{n % 3}", priority=n % 5) for n in range(50)]
    answers = do(store.enqueue_many, jobs)
    payloads = dict(rows(Job).values_list("id", "payload"))
    assert [payloads[a.job_id] for a in answers] == [j.payload for j in jobs]
    for start in range(3):
        ids = [a.job_id for a in answers[start::3]]
        assert ids == sorted(ids), "inside a queue the order of the batch is the order of the ids"
    assert all(a.created and a.state == "ready" for a in answers)
    assert_counters_exact()


def test_a_batch_larger_than_one_statement_is_whole_and_in_order() -> None:
    answers = do(store.enqueue_many, [job(args=[n]) for n in range(4_100)])
    ids = [a.job_id for a in answers]
    assert ids == sorted(set(ids))
    texts = rows(Job).order_by("id").values_list("payload", flat=True)
    assert [json.loads(text)["args"][0] for text in texts] == list(range(4_100))
    assert_counters_exact()


def test_a_batch_mixes_jobs_for_now_and_for_later() -> None:
    answers = do(store.enqueue_many, [job(), job(run_after=after(9)), job()])
    assert [a.state for a in answers] == ["ready", "scheduled", "ready"]
    assert_counters_exact()


def test_twins_in_a_batch_share_one_job() -> None:
    answers = do(store.enqueue_many, [job(idempotency_key="k") for _ in range(3)])
    assert len({a.job_id for a in answers}) == 1
    assert [a.created for a in answers] == [True, False, False]
    assert rows(Job).count() == 1
    assert_counters_exact()


def test_a_batch_finds_the_jobs_that_hold_its_keys() -> None:
    first = enqueue(idempotency_key="k1")
    answers = do(store.enqueue_many, [job(idempotency_key="k0"), job(), job(idempotency_key="k1")])
    assert [a.created for a in answers] == [True, True, False]
    assert answers[2].job_id == first
    assert rows(Job).count() == 3


def test_a_batch_with_more_keys_than_one_statement_may_bind_finds_them_all() -> None:
    jobs = [job(idempotency_key=f"k{n}") for n in range(1_203)]
    first = do(store.enqueue_many, jobs)
    again = do(store.enqueue_many, jobs)
    assert [a.job_id for a in again] == [a.job_id for a in first]
    assert not any(a.created for a in again)


def test_a_conflict_in_a_batch_writes_none_of_it() -> None:
    enqueue(idempotency_key="k", args=[1])
    with nothing_written(), pytest.raises(IdempotencyConflict):
        do(store.enqueue_many, [job(), job(idempotency_key="k", args=[2]), job(queue="new")])


@pytest.mark.parametrize("other", [{"args": [2]}, {"task": "another.task"}])
def test_twins_in_a_batch_with_different_calls_are_refused(other: dict[str, Any]) -> None:
    with nothing_written(), pytest.raises((InvalidJob, IdempotencyConflict), match="'k'"):
        do(store.enqueue_many, [job(idempotency_key="k"), job(idempotency_key="k", **other)])


def test_a_batch_that_does_not_fit_whole_is_refused_whole() -> None:
    limit("b", capacity=2)
    with nothing_written(), pytest.raises(QueueFull) as full:
        do(store.enqueue_many, [job(queue="a"), *[job(queue="b")] * 3])
    assert (full.value.queue, full.value.wanted) == ("b", 3)
    do(store.enqueue_many, [job(queue="a"), *[job(queue="b")] * 2])


def test_twins_and_taken_keys_need_no_room() -> None:
    limit(capacity=2)
    enqueue(idempotency_key="k")
    twins = [job(idempotency_key="k"), job(idempotency_key="n"), job(idempotency_key="n")]
    assert [a.created for a in do(store.enqueue_many, twins)] == [False, True, False]


# --- transactions ------------------------------------------------------------------------------


def test_an_enqueue_lives_and_dies_with_the_callers_transaction() -> None:
    with nothing_written(), atomic():
        enqueue(queue="never-seen")
        connection().set_rollback(True)
    with atomic():
        job_id = enqueue()
    assert state(job_id) == "ready"


def test_a_caught_refusal_leaves_the_callers_transaction_usable() -> None:
    limit(capacity=1)
    with atomic():
        first = enqueue()
        with pytest.raises(QueueFull):
            enqueue()
        second = enqueue(queue="mail")
    assert [state(first), state(second)] == ["ready", "ready"]
    assert_counters_exact()


def test_a_process_that_may_print_long_integers_cannot_enqueue_what_others_cannot_read() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with nothing_written(), pytest.raises(PayloadError):
            enqueue(args=[HUGE])
    finally:
        sys.set_int_max_str_digits(before)


def test_limits_that_another_process_has_changed_since_the_last_enqueue_hold_at_once() -> None:
    do(store.enqueue, job())
    by_another_process = rows(Queue).filter(name="default")
    by_another_process.update(capacity=1)
    with pytest.raises(QueueFull):
        do(store.enqueue, job())
    by_another_process.update(capacity=None, aging_seconds=10.0)
    urgent = read(do(store.enqueue, job(priority=2)).job_id)
    assert urgent.rank == rank(urgent.available_at, 2, 10.0)
    by_another_process.update(aging_seconds=None)
    strict = read(do(store.enqueue, job(priority=2)).job_id)
    assert strict.rank == rank(strict.available_at, 2, None)
    assert_counters_exact()
