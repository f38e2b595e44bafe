"""``settings.RELAY``: read lazily, validated as a whole, cached until the settings change.

Keys of the setting are the names of `RelaySettings` in upper case. `get` raises one
`ConfigurationError` that lists everything that is wrong; `problems` is the same list, for the
system checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final

from django.conf import settings
from django.core.signals import setting_changed

from relay_queue.backoff import JITTERS, MAX_DELAY_SECONDS
from relay_queue.exceptions import ConfigurationError, shown
from relay_queue.ranking import MAX_AGING_SECONDS, MIN_AGING_SECONDS

MAX_QUEUE_NAME_CHARS: Final = 100

_DAY: Final = 86_400.0
_YEAR: Final = 365 * _DAY
_INT32: Final = 2_147_483_647
_DOTTED: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# A parser takes a value and returns it in its final form, or raises _Invalid with what to do.
_Parser = Callable[[Any], Any]


class _Invalid(ValueError):
    """A value was refused; the text says what is wanted instead."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in ``settings.RELAY``."""

    key: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.message} {self.hint}"


def _number(value: Any, kind: type, low: float, high: float, optional: bool) -> Any:
    if value is None and optional:
        return None
    allowed = (int,) if kind is int else (int, float)
    wanted = "an integer" if kind is int else "a number"
    suffix = ", or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        raise _Invalid(f"Use {wanted} from {low:,.15g} to {high:,.15g}{suffix}.")
    return kind(value)


def _seconds(default: float | None, low: float, high: float) -> Any:
    """Declare a duration; None is allowed if it is the default."""

    def parse(value: Any) -> Any:
        return _number(value, float, low, high, default is None)

    return field(default=default, metadata={"parse": parse})


def _retention(default: float | None) -> Any:
    """Declare for how long finished rows are kept; None keeps them for ever."""
    return field(
        default=default,
        metadata={"parse": lambda value: _number(value, float, 0, 100 * _YEAR, True)},
    )


def _count(default: int | None, low: int, high: int) -> Any:
    """Declare a whole number; None is allowed if it is the default."""

    def parse(value: Any) -> Any:
        return _number(value, int, low, high, default is None)

    return field(default=default, metadata={"parse": parse})


def _parsed(default: Any, parse: _Parser) -> Any:
    return field(default=default, metadata={"parse": parse})


def queue_name_fault(name: object) -> str | None:
    """Return what is wrong with a queue's name, or None. Commands separate names by commas."""
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not a string"
    if not 1 <= len(name) <= MAX_QUEUE_NAME_CHARS:
        return f"has {len(name)} characters, not 1 to {MAX_QUEUE_NAME_CHARS}"
    if not name.isprintable():
        return "has characters that cannot be printed"
    if "," in name:
        return "has a comma, which separates names on the command line"
    if name != name.strip():
        return "begins or ends with a space"
    return None


def _parse_aging(value: Any) -> Any:
    return _number(value, float, MIN_AGING_SECONDS, MAX_AGING_SECONDS, True)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What ``RELAY["QUEUES"]`` says of one queue. It is written to the table by ``migrate``."""

    capacity: int | None = _count(None, 1, _INT32)
    """Unfinished jobs that the queue admits; None is unbounded."""
    max_running: int | None = _count(None, 1, _INT32)
    """Leases that may be open at once; None is unbounded."""
    aging_seconds: float | None = _parsed(60.0, _parse_aging)
    """Waiting time worth one priority class; None is strict priority."""


def _parse_queues(value: Any) -> dict[str, QueueOptions] | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        if len({repr(name) for name in value}) < len(value):
            raise _Invalid("Name each queue once.")
        value = dict.fromkeys(map(_require_queue_name, value))
    if not isinstance(value, Mapping) or not value:
        raise _Invalid(
            "Use a list of names or a dictionary of names and options, "
            "or None to create queues on first use."
        )
    return {_require_queue_name(name): _parse_options(name, raw) for name, raw in value.items()}


def _require_queue_name(name: Any) -> str:
    fault = queue_name_fault(name)
    if fault:
        raise _Invalid(f"The queue name {shown(name)} {fault}.")
    return str(name)


def _parse_options(name: str, raw: Any) -> QueueOptions:
    if raw is None or isinstance(raw, QueueOptions):
        return raw or QueueOptions()
    if not isinstance(raw, Mapping):
        raise _Invalid(f"The options of queue {name!r} must be a dictionary.")
    options, found = _read(QueueOptions, raw, str, f"QUEUES[{name!r}]")
    if found:
        raise _Invalid(" ".join(map(str, found)))
    return QueueOptions(**options)


def _parse_database(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Invalid("Use an alias of DATABASES.")
    return value


def _parse_jitter(value: Any) -> str:
    if value not in JITTERS:
        raise _Invalid('Use "none" or "full".')
    return str(value)


def _parse_wakeup(value: Any) -> str:
    if value not in ("auto", "poll"):
        raise _Invalid('Use "auto" or "poll".')
    return str(value)


def _parse_token(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and len(value) >= 16 and value.isascii()):
        raise _Invalid("Use a random text of at least 16 ASCII characters, or None.")
    return None if value is None else str(value)


def _parse_redact(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
        raise _Invalid("Use a list of names of arguments.")
    return tuple(value)


def _parse_formatter(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and _DOTTED.fullmatch(value)):
        raise _Invalid('Use the dotted path of a function, such as "shop.console.shown", or None.')
    return value


def _parse_schedules(value: Any) -> Mapping[str, Mapping[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _Invalid("Use a dictionary of names and what each schedule is.")
    for name, entry in value.items():
        if not isinstance(name, str) or not isinstance(entry, Mapping) or "task" not in entry:
            raise _Invalid(
                f'{shown(name)} is {shown(entry)}. Use a dictionary with "task", a dotted path, and '
                '"cron" or "every".'
            )
    return {name: dict(entry) for name, entry in value.items()}


def _parse_project(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= 90):
        raise _Invalid("Use a name of 1 to 90 characters, or None: the package of the settings.")
    return value


def _parse_sync(value: Any) -> str:
    if value not in ("migrate", "command"):
        raise _Invalid('Use "migrate" or "command".')
    return str(value)


def _parse_acts_backend(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _Invalid("Use an alias of TASKS, or None.")
    return value


def _parse_acts_queue(value: Any) -> str | None:
    return None if value is None else _require_queue_name(value)


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """The validated settings. Each field is a key of ``settings.RELAY`` in lower case."""

    database: str = _parsed("default", _parse_database)
    """Alias of the database that holds the queue."""
    queues: Mapping[str, QueueOptions] | None = _parsed(None, _parse_queues)
    """The queues that exist: names, or names with options. None creates queues on first use."""
    redact: tuple[str, ...] = _parsed((), _parse_redact)
    """Names of arguments whose values the console hides."""
    formatter: str | None = _parsed(None, _parse_formatter)
    """Dotted path of a function that words arguments, results and errors for the console."""
    schedules: Mapping[str, Mapping[str, Any]] | None = _parsed(None, _parse_schedules)
    """Schedules of tasks that the project does not decorate itself."""
    project: str | None = _parsed(None, _parse_project)
    """Whose schedules this code declares, where projects share a queue; None is the package of the settings."""
    sync: str = _parsed("migrate", _parse_sync)
    """Whether ``migrate`` makes the schedules what the code declares, or only ``relay schedules sync``."""
    acts_backend: str | None = _parsed(None, _parse_acts_backend)
    """Alias of ``TASKS`` through which the console enqueues bulk acts; None is the first of ours."""
    acts_queue: str | None = _parsed(None, _parse_acts_queue)
    """The queue of bulk acts; None is ``default``, or the first that the alias admits."""

    metrics_token: str | None = _parsed(None, _parse_token)
    """What a scraper of ``/metrics`` must send; None admits signed-in users only."""

    lease_seconds: float = _seconds(60.0, 0.1, 365 * _DAY)
    """Length of a lease when the task names none. Workers renew leases before they end."""
    min_lease_seconds: float = _seconds(1.0, 0.1, 365 * _DAY)
    """The shortest lease that a task may ask for."""
    max_lease_seconds: float = _seconds(86_400.0, 0.1, 365 * _DAY)
    """The longest lease that a task may ask for."""

    max_attempts: int = _count(3, 1, 1_000_000)
    """Charged attempts of a job when the task names none."""
    max_attempts_limit: int = _count(1000, 1, 1_000_000)
    """The most attempts that a task may ask for."""
    backoff_base_seconds: float = _seconds(1.0, 0, MAX_DELAY_SECONDS)
    """Delay after the first failure; it doubles with each further one."""
    backoff_max_seconds: float = _seconds(300.0, 0, MAX_DELAY_SECONDS)
    """The longest delay between attempts."""
    backoff_jitter: str = _parsed("none", _parse_jitter)
    """``"none"``, or ``"full"`` for a delay that is uniform between zero and the computed one."""
    timeout_seconds: float | None = _seconds(None, 0.001, 365 * _DAY)
    """Run time after which an attempt is timed out; None is no limit."""
    atomic_max_seconds: float = _seconds(2.0, 0.001, 3600)
    """The longest timeout of a task with ``atomic=True``, which holds the writer meanwhile."""

    max_payload_bytes: int = _count(1_048_576, 64, 268_435_456)
    """The largest payload, in bytes of JSON text."""
    max_payload_depth: int = _count(100, 1, 200)
    """How deep lists and dictionaries may be nested in arguments and results."""
    max_result_bytes: int = _count(1_048_576, 64, 268_435_456)
    """The largest result, in bytes of JSON text."""
    max_traceback_chars: int = _count(32_768, 0, 1_048_576)
    """Characters kept of a traceback."""
    max_error_chars: int = _count(500, 50, 500)
    """Characters kept of the one line that sums up an error; the column holds 500."""
    max_defer_seconds: float | None = _seconds(None, 0, 100 * _YEAR)
    """How far ahead ``run_after`` may lie; None is as far as the database can store a time."""

    concurrency: int = _count(8, 1, 1024)
    """Slots of a worker process."""
    processes: int = _count(1, 1, 256)
    """Worker processes of one ``runworker``."""
    shutdown_timeout_seconds: float = _seconds(30.0, 0, 7 * _DAY)
    """How long a stopping worker waits for the functions it runs."""
    ready_timeout_seconds: float = _seconds(60.0, 1, 3600)
    """How long the supervisor waits for a worker to be ready."""
    poll_seconds: float = _seconds(5.0, 0.1, 3600)
    """How often an idle worker looks although no ring came."""
    wakeup: str = _parsed("auto", _parse_wakeup)
    """``"auto"``: by the means of the database. ``"poll"``: by looking now and then only."""
    gate_hold_seconds: float = _seconds(10.0, 0.1, 3600)
    """How long a slot may hold the writer before its process ends itself."""

    retain_succeeded_seconds: float | None = _retention(7 * _DAY)
    """How long succeeded jobs are kept; None is for ever."""
    retain_cancelled_seconds: float | None = _retention(30 * _DAY)
    """How long cancelled jobs are kept; None is for ever."""
    retain_dead_seconds: float | None = _retention(None)
    """How long dead letters are kept; None is until an operator acts."""
    retain_runs_seconds: float | None = _retention(90 * _DAY)
    """How long the runs of schedules are kept; the newest of each always is."""
    retain_minutes_seconds: float | None = _retention(14 * _DAY)
    """How long the counters by minute are kept; None is for ever."""
    retain_workers_seconds: float | None = _retention(7 * _DAY)
    """How long rows of stopped workers are kept; None is for ever."""

    @property
    def retain_bulk_acts_seconds(self) -> float | None:
        """How long finished bulk acts are kept: as statistics, but a day at least.

        While its row is there, a bulk act that is submitted again is known.
        """
        kept = self.retain_minutes_seconds
        return None if kept is None else max(kept, _DAY)


# Pairs where the first must not be above the second.
_ORDERED: Final = (
    ("min_lease_seconds", "lease_seconds"),
    ("lease_seconds", "max_lease_seconds"),
    ("min_lease_seconds", "max_lease_seconds"),
    ("max_attempts", "max_attempts_limit"),
    ("backoff_base_seconds", "backoff_max_seconds"),
    ("atomic_max_seconds", "gate_hold_seconds"),
)


def get() -> RelaySettings:
    """Return the settings in force. Raises `ConfigurationError` listing every problem."""
    return _cached or _load()


def problems(raw: object) -> list[Problem]:
    """Return everything that is wrong with a value of ``settings.RELAY``, in its order."""
    return _validate(raw)[1]


_cached: RelaySettings | None = None


def _load() -> RelaySettings:
    global _cached  # noqa: PLW0603
    values, found = _validate(getattr(settings, "RELAY", {}))
    if found:
        lines = "".join(f"\n- {problem}" for problem in found)
        raise ConfigurationError(f"settings.RELAY is not usable:{lines}")
    _cached = RelaySettings(**values)
    return _cached


def _forget(*, setting: str, **_: Any) -> None:
    """Drop the cache when a test overrides the setting."""
    global _cached  # noqa: PLW0603
    if setting == "RELAY":
        _cached = None


setting_changed.connect(_forget, dispatch_uid="relay_queue.conf")


def _validate(raw: object) -> tuple[dict[str, Any], list[Problem]]:
    if not isinstance(raw, Mapping):
        message = f"RELAY is of type {type(raw).__name__}, not a dictionary."
        return {}, [Problem("RELAY", message, 'Write RELAY = {"CONCURRENCY": 8}.')]
    values, found = _read(RelaySettings, raw, str.upper, "RELAY")
    return values, found + list(_disordered(values, {problem.key for problem in found}))


def _read(
    declared: type, raw: Mapping[Any, Any], spell: Callable[[str], str], where: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Parse the entries of a dictionary by the fields of a dataclass.

    Returns the good values by field name, and a problem for each bad or unknown entry.
    """
    known = {spell(item.name): item for item in fields(declared)}
    values: dict[str, Any] = {}
    found: list[Problem] = []
    for key, value in raw.items():
        if key not in known:
            found.append(_unknown(key, list(known), where))
            continue
        try:
            values[known[key].name] = known[key].metadata["parse"](value)
        except _Invalid as refusal:
            message = f'{where}["{key}"] is {shown(value)}, which is not usable.'
            found.append(Problem(key, message, str(refusal)))
    return values, found


def _unknown(key: Any, known: list[str], where: str) -> Problem:
    near = get_close_matches(str(key).upper() if known[0].isupper() else str(key), known, n=1)
    hint = f'Did you mean "{near[0]}"?' if near else f"The keys are {', '.join(sorted(known))}."
    return Problem(str(key), f'{where}["{key}"] is not a key of Relay.', hint)


def _disordered(values: Mapping[str, Any], broken: set[str]) -> Iterator[Problem]:
    defaults = {item.name: item.default for item in fields(RelaySettings)}
    for low, high in _ORDERED:
        if {low.upper(), high.upper()} & broken:
            continue  # judged already; comparing it with the default would only confuse
        small, large = (values.get(name, defaults[name]) for name in (low, high))
        if small > large:
            message = f'RELAY["{low.upper()}"] is {small:g}, above "{high.upper()}" of {large:g}.'
            yield Problem(low.upper(), message, "Lower the first or raise the second.")
