"""``settings.RELAY`` is judged as a whole: every key has bounds, and one error lists all faults."""

import ast
import dataclasses
import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from relay_queue import conf
from relay_queue.backoff import Backoff
from relay_queue.exceptions import ConfigurationError

# Smallest and largest value of each numeric key, and whether None is allowed.
WHOLE_NUMBERS = {
    "MAX_ATTEMPTS": (1, 1_000_000, False),
    "MAX_ATTEMPTS_LIMIT": (1, 1_000_000, False),
    "MAX_PAYLOAD_BYTES": (64, 268_435_456, False),
    "MAX_PAYLOAD_DEPTH": (1, 200, False),
    "MAX_RESULT_BYTES": (64, 268_435_456, False),
    "MAX_TRACEBACK_CHARS": (0, 1_048_576, False),
    "MAX_ERROR_CHARS": (50, 500, False),
    "CONCURRENCY": (1, 1024, False),
    "PROCESSES": (1, 256, False),
}
YEAR = 365 * 86_400
DURATIONS = {
    "LEASE_SECONDS": (0.1, YEAR, False),
    "MIN_LEASE_SECONDS": (0.1, YEAR, False),
    "MAX_LEASE_SECONDS": (0.1, YEAR, False),
    "BACKOFF_BASE_SECONDS": (0, 10 * YEAR, False),
    "BACKOFF_MAX_SECONDS": (0, 10 * YEAR, False),
    "TIMEOUT_SECONDS": (0.001, YEAR, True),
    "ATOMIC_MAX_SECONDS": (0.001, 3600, False),
    "MAX_DEFER_SECONDS": (0, 100 * YEAR, True),
    "SHUTDOWN_TIMEOUT_SECONDS": (0, 7 * 86_400, False),
    "READY_TIMEOUT_SECONDS": (1, 3600, False),
    "POLL_SECONDS": (0.1, 3600, False),
    "GATE_HOLD_SECONDS": (0.1, 3600, False),
    "RETAIN_SUCCEEDED_SECONDS": (0, 100 * YEAR, True),
    "RETAIN_CANCELLED_SECONDS": (0, 100 * YEAR, True),
    "RETAIN_DEAD_SECONDS": (0, 100 * YEAR, True),
    "RETAIN_RUNS_SECONDS": (0, 100 * YEAR, True),
    "RETAIN_MINUTES_SECONDS": (0, 100 * YEAR, True),
    "RETAIN_WORKERS_SECONDS": (0, 100 * YEAR, True),
}
NUMBERS = WHOLE_NUMBERS | DURATIONS
OTHERS = {
    "ACTS_BACKEND",
    "ACTS_QUEUE",
    "DATABASE",
    "QUEUES",
    "FORMATTER",
    "REDACT",
    "BACKOFF_JITTER",
    "WAKEUP",
    "METRICS_TOKEN",
    "SCHEDULES",
    "PROJECT",
    "SYNC",
}


def judged(key: str, value: Any) -> list[conf.Problem]:
    """Return what is wrong with one key by itself, leaving out its relations to others."""
    return [p for p in conf.problems({key: value}) if "above" not in p.message]


@pytest.fixture(autouse=True)
def settings_are_read_anew() -> Iterator[None]:
    with override_settings(RELAY={}):
        yield


def test_every_key_is_covered_by_these_tests() -> None:
    declared = {field.name.upper() for field in dataclasses.fields(conf.RelaySettings)}
    assert declared == NUMBERS.keys() | OTHERS


@pytest.mark.parametrize("declared", [conf.RelaySettings, conf.QueueOptions])
def test_every_key_is_documented(declared: type) -> None:
    body = ast.parse(inspect.getsource(declared)).body[0].body  # type: ignore[attr-defined]
    for position, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            after = body[position + 1]
            assert isinstance(after, ast.Expr), ast.unparse(node)
            assert isinstance(after.value, ast.Constant), ast.unparse(node)


@pytest.mark.parametrize(("key", "bounds"), NUMBERS.items())
def test_the_bounds_of_a_number_are_accepted_and_what_lies_beyond_is_refused(
    key: str, bounds: tuple[float, float, bool]
) -> None:
    low, high, _ = bounds
    step = 1 if key in WHOLE_NUMBERS else 0.0009
    assert judged(key, low) == judged(key, high) == []
    for value in (low - step, high + step, -math.inf, math.inf, math.nan):
        (problem,) = judged(key, value)
        assert problem.key == key
        assert repr(value) in problem.message
        assert f"{high:,.15g}" in problem.hint


@pytest.mark.parametrize(("key", "bounds"), NUMBERS.items())
def test_a_number_must_be_a_number(key: str, bounds: tuple[float, float, bool]) -> None:
    for value in (True, False, "1", [1], 1j):
        assert judged(key, value), value
    assert bool(judged(key, None)) == (not bounds[2])


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_a_whole_number_may_not_have_a_fraction(key: str) -> None:
    (problem,) = judged(key, 100.0)
    assert "an integer" in problem.hint


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"MIN_LEASE_SECONDS": 61}, "MIN_LEASE_SECONDS"),
        ({"MAX_LEASE_SECONDS": 59}, "LEASE_SECONDS"),
        ({"LEASE_SECONDS": 90_000}, "LEASE_SECONDS"),
        ({"LEASE_SECONDS": 0.5}, "MIN_LEASE_SECONDS"),
        ({"MAX_ATTEMPTS": 1001}, "MAX_ATTEMPTS"),
        ({"MAX_ATTEMPTS_LIMIT": 2}, "MAX_ATTEMPTS"),
        ({"BACKOFF_BASE_SECONDS": 301}, "BACKOFF_BASE_SECONDS"),
        ({"BACKOFF_MAX_SECONDS": 0.5}, "BACKOFF_BASE_SECONDS"),
        ({"GATE_HOLD_SECONDS": 1}, "ATOMIC_MAX_SECONDS"),
    ],
)
def test_a_limit_below_what_it_limits_is_refused_even_against_a_default(
    settings: dict[str, float], key: str
) -> None:
    (problem,) = conf.problems(settings)
    assert problem.key == key
    assert "above" in problem.message


def test_a_value_that_is_wrong_by_itself_is_not_judged_twice() -> None:
    assert len(conf.problems({"MIN_LEASE_SECONDS": 10**9, "LEASE_SECONDS": 5})) == 1


def test_equal_limits_are_accepted() -> None:
    settings = {"MIN_LEASE_SECONDS": 5, "LEASE_SECONDS": 5, "MAX_LEASE_SECONDS": 5}
    assert conf.problems(settings) == []


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("LEASE_SECOND", 'Did you mean "LEASE_SECONDS"?'),
        ("concurrency", 'Did you mean "CONCURRENCY"?'),
        ("XYZZY", "The keys are ACTS_BACKEND"),
        (7, "The keys are ACTS_BACKEND"),
    ],
)
def test_an_unknown_key_is_refused_with_the_near_name(key: Any, hint: str) -> None:
    (problem,) = conf.problems({key: 1})
    assert problem.key == str(key)
    assert hint in problem.hint


@pytest.mark.parametrize("raw", [None, [], "x", 3])
def test_the_setting_must_be_a_dictionary(raw: Any) -> None:
    (problem,) = conf.problems(raw)
    assert problem.key == "RELAY"


@pytest.mark.parametrize("value", ["", None, 3, ["default"]])
def test_the_database_is_an_alias(value: Any) -> None:
    assert judged("DATABASE", value)


@pytest.mark.parametrize("value", ["some", None, True, ["none"]])
def test_jitter_is_none_or_full(value: Any) -> None:
    assert not judged("BACKOFF_JITTER", "full")
    (problem,) = judged("BACKOFF_JITTER", value)
    assert '"none" or "full"' in problem.hint


@pytest.mark.parametrize("value", ["short", "ünicode" * 9, True, 5, b"0123456789abcdef"])
def test_a_token_for_metrics_is_long_text(value: Any) -> None:
    assert not judged("METRICS_TOKEN", "0123456789abcdef")
    assert not judged("METRICS_TOKEN", None)
    (problem,) = judged("METRICS_TOKEN", value)
    assert "16 ASCII characters" in problem.hint


@pytest.mark.parametrize("value", ["none", None, True, ["poll"]])
def test_wakeup_is_auto_or_poll(value: Any) -> None:
    assert not judged("WAKEUP", "poll")
    (problem,) = judged("WAKEUP", value)
    assert '"auto" or "poll"' in problem.hint


@pytest.mark.parametrize("value", ["password", None, [1], [""], {"password": 1}])
def test_redact_is_a_list_of_names(value: Any) -> None:
    assert not judged("REDACT", ["password", "token"])
    assert judged("REDACT", value)


@pytest.mark.parametrize("value", ["", 7, ["default"]])
@pytest.mark.parametrize("key", ["ACTS_BACKEND", "ACTS_QUEUE"])
def test_acts_go_to_one_alias_and_one_queue(key: str, value: Any) -> None:
    assert not judged(key, "acts")
    assert not judged(key, None)
    assert judged(key, value)


class TestQueues:
    def read(self, value: Any) -> Any:
        with override_settings(RELAY={"QUEUES": value}):
            return conf.get().queues

    def test_none_means_that_queues_are_created_on_first_use(self) -> None:
        assert self.read(None) is None

    @pytest.mark.parametrize("names", [["a", "b c"], ("a", "b c")])
    def test_a_list_of_names_gives_each_the_default_options(self, names: Any) -> None:
        assert self.read(names) == {"a": conf.QueueOptions(), "b c": conf.QueueOptions()}

    def test_a_dictionary_gives_options_by_name_and_keeps_the_order(self) -> None:
        queues = self.read(
            {
                "z": {"capacity": 5, "max_running": 2, "aging_seconds": None},
                "a": None,
                "m": {},
                "o": conf.QueueOptions(capacity=1),
            }
        )
        assert list(queues) == ["z", "a", "m", "o"]
        assert queues["z"] == conf.QueueOptions(5, 2, None)
        assert queues["a"] == queues["m"] == conf.QueueOptions(None, None, 60.0)
        assert queues["o"].capacity == 1

    @pytest.mark.parametrize(
        "value",
        [[], {}, "default", 3, {"a"}, ["a", "a"], [["a"]], {"a": 5}, {"a": [1]}, {1: {}}],
    )
    def test_other_shapes_are_refused(self, value: Any) -> None:
        (problem,) = conf.problems({"QUEUES": value})
        assert problem.key == "QUEUES"

    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("", "0 characters"),
            ("q" * 101, "101 characters"),
            ("a,b", "comma"),
            ("a\nb", "printed"),
            ("a\x00", "printed"),
            ("\ud800", "printed"),
            (" a", "space"),
            ("a ", "space"),
            (7, "type int"),
        ],
    )
    def test_an_unusable_name_is_refused_with_the_reason(self, name: Any, fault: str) -> None:
        assert fault in str(conf.queue_name_fault(name))
        for value in ([name], {name: {}}):
            (problem,) = conf.problems({"QUEUES": value})
            assert fault in problem.hint

    @pytest.mark.parametrize("name", ["q", "q" * 100, "mail.out-1_2", "größe", "a b"])
    def test_an_ordinary_name_has_no_fault(self, name: str) -> None:
        assert conf.queue_name_fault(name) is None

    @pytest.mark.parametrize(
        ("options", "hint"),
        [
            ({"capacity": 0}, "from 1 to 2,147,483,647, or None"),
            ({"capacity": 2**31}, "from 1 to 2,147,483,647, or None"),
            ({"capacity": True}, "an integer"),
            ({"max_running": 0}, "from 1 to"),
            ({"max_running": 1.5}, "an integer"),
            ({"aging_seconds": 0}, "from 0.001 to 315,360,000, or None"),
            ({"aging_seconds": math.nan}, "a number"),
            ({"capacty": 1}, 'Did you mean "capacity"?'),
        ],
    )
    def test_an_unusable_option_is_refused_with_its_bounds(
        self, options: dict[str, Any], hint: str
    ) -> None:
        (problem,) = conf.problems({"QUEUES": {"mail": options}})
        assert "mail" in problem.hint
        assert hint in problem.hint


class TestGet:
    def test_an_empty_setting_gives_the_documented_defaults(self) -> None:
        found = conf.get()
        assert found == conf.RelaySettings()
        assert (found.lease_seconds, found.max_attempts, found.concurrency) == (60.0, 3, 8)
        assert found.retain_dead_seconds is None
        assert found.retain_succeeded_seconds == 7 * 86_400

    def test_the_defaults_have_no_problems(self) -> None:
        raw = {k.upper(): v for k, v in dataclasses.asdict(conf.RelaySettings()).items()}
        assert conf.problems(raw) == []

    def test_the_default_backoff_is_usable(self) -> None:
        found = conf.get()
        assert Backoff(found.backoff_base_seconds, found.backoff_max_seconds).jitter == "none"

    def test_a_missing_setting_is_an_empty_one(self, settings: Any) -> None:
        del settings.RELAY
        assert conf.get() == conf.RelaySettings()

    def test_values_are_read_in_their_final_types(self) -> None:
        with override_settings(RELAY={"LEASE_SECONDS": 30, "REDACT": ["a"], "DATABASE": "jobs"}):
            found = conf.get()
        assert isinstance(found.lease_seconds, float)
        assert (found.lease_seconds, found.redact, found.database) == (30, ("a",), "jobs")

    def test_the_settings_are_read_once_and_again_when_they_change(self) -> None:
        first = conf.get()
        assert conf.get() is first
        with override_settings(RELAY={"CONCURRENCY": 2}):
            assert conf.get().concurrency == 2
        assert conf.get().concurrency == 8

    def test_one_error_lists_every_problem(self) -> None:
        raw = {"CONCURRENCY": 0, "LEASE_SECOND": 5, "MIN_LEASE_SECONDS": 100}
        with override_settings(RELAY=raw):
            with pytest.raises(ConfigurationError) as caught:
                conf.get()
            listed = str(caught.value)
        for problem in conf.problems(raw):
            assert problem.message in listed
            assert problem.hint in listed
        assert len(conf.problems(raw)) == 3

    def test_the_settings_cannot_be_changed_by_their_readers(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            conf.get().concurrency = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("minutes", "bulk_acts"), [(None, None), (0, 86_400.0), (1e6, 1e6), (86_401.0, 86_401.0)]
)
def test_bulk_acts_are_kept_as_statistics_but_a_day_at_least(
    settings: Any, minutes: float | None, bulk_acts: float | None
) -> None:
    settings.RELAY = {"RETAIN_MINUTES_SECONDS": minutes}
    assert conf.get().retain_bulk_acts_seconds == bulk_acts


@pytest.mark.parametrize("value", ["", "shown", 7, ["shop.shown"], "shop.", "shop..shown", "a b.c"])
def test_formatter_is_a_dotted_path(value: Any) -> None:
    assert not judged("FORMATTER", "shop.console.shown")
    assert not judged("FORMATTER", None)
    assert judged("FORMATTER", value)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("SCHEDULES", ["nightly"], "dictionary of names"),
        ("SCHEDULES", {"nightly": {"every": 5}}, 'with "task"'),
        ("SCHEDULES", {5: {"task": "a.b", "every": 5}}, 'with "task"'),
        ("PROJECT", "", "1 to 90 characters"),
        ("PROJECT", 5, "1 to 90 characters"),
        ("SYNC", "never", '"migrate" or "command"'),
    ],
)
def test_settings_of_schedules_are_checked(key: str, value: Any, hint: str) -> None:
    (problem,) = conf.problems({key: value})
    assert hint in problem.hint
