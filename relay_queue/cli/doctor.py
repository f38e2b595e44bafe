"""``relay doctor``: versions, settings, workers and surroundings, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import sqlite3
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from time import time
from typing import Any, Final, Literal

import django
from django.core import checks
from django.db import Error, InterfaceError, connections
from django.db.migrations.executor import MigrationExecutor

import relay_queue
from relay_queue import compat, conf, store
from relay_queue.checks import TAG
from relay_queue.cli.base import Verb
from relay_queue.cli.inspect import pragmas
from relay_queue.cli.output import Output, Style, duration, short
from relay_queue.cli.status import START_ONE
from relay_queue.db import replaced
from relay_queue.db.filename import database_path
from relay_queue.db.gate import gate_of
from relay_queue.models import Job, Lease, Worker
from relay_queue.query import looks, server, status
from relay_queue.store.dialects import dialect_for
from relay_queue.store.workers import lock_key
from relay_queue.task import task_packages
from relay_queue.worker.liveness import NO_LOCK, Liveness, LockIdentity, probe

Level = Literal["ok", "warn", "fail"]

RELAY_ENGINE: Final = "relay_queue.db.sqlite3"
LARGE_LOG_BYTES: Final = 256 * 1024 * 1024
LOW_DISK_BYTES: Final = 1024**3
NO_DISK_BYTES: Final = 64 * 1024 * 1024
SHORT_TIMEOUT_MS: Final = 1_000
# Workers write a heartbeat every few seconds; a smaller difference of clocks is harmless.
CLOCK_SLACK_SECONDS: Final = 5.0
SYNCHRONOUS: Final = ("off", "normal", "full", "extra")
NOT_REACHED: Final = "Start the server, or correct DATABASES: where it is, and who may connect."
HINDERED: Final = (
    "No job is at fault, and none is given up: mend the table, the right, the sequence or the trigger, "
    "and the worker goes on by itself."
)
OTHER_VERSION: Final = (
    "What it imports later comes from the new code, which may not fit the old. Restart the workers "
    "after each upgrade."
)
CHANGED_CODE: Final = (
    "It runs what it has loaded, and loads the rest from the new code, which may not fit. Restart "
    "the workers after each change: runworker --reload does so by itself."
)
NOT_RECOVERED: Final = (
    "These jobs stay running until a worker recovers them: manage.py runworker, or relay recover. "
    "If workers run, their lines here say what keeps them from it."
)
MOST_COUNTED: Final = 1_000
PRAGMAS: Final[dict[str, tuple[Container[Any], str]]] = {
    "journal_mode": (
        {"wal"},
        "Without a write-ahead log readers and writers block each other. Set it to WAL.",
    ),
    "synchronous": (
        {"full", "extra"},
        "Committed jobs may be lost when the power fails. Set it to FULL.",
    ),
    "busy_timeout": (
        range(SHORT_TIMEOUT_MS, 2**31),
        "Writers give up quickly. Set timeout in OPTIONS to 20 seconds.",
    ),
    "foreign_keys": ({1}, "Set PRAGMA foreign_keys=ON."),
}
"""The sound values of each pragma, and what another costs."""

SERVER_SETTINGS: Final[dict[str, tuple[Container[Any], str]]] = {
    "fsync": ({"on"}, "A crash of the machine may destroy the database. Set it to on."),
    "full_page_writes": ({"on"}, "A crash of the machine may destroy the database. Set it to on."),
    "synchronous_commit": (
        {"on", "local", "remote_write", "remote_apply"},  # the others are as durable, or more
        "Committed jobs may be lost in a crash. Set it to on.",
    ),
    "autovacuum": ({"on"}, "Nobody sweeps dead rows, so claims get slower. Set it to on."),
    "default_transaction_isolation": (
        {"read committed"},
        "An enqueue in your own transaction may pass a capacity. Set it to read committed.",
    ),
}
"""The same of the settings of a server."""

SEQUENCE_BEHIND: Final = (
    "New rows get ids that are taken, or that are lower than those before. Raise it: "
    "manage.py sqlsequencereset relay_queue | manage.py dbshell"
)

OLD_TRANSACTION: Final = timedelta(minutes=10)
FEW_CONNECTIONS_LEFT: Final = 0.1
STYLES: Final[dict[Level, Style]] = {"ok": "good", "warn": "warning", "fail": "bad"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: what was examined, its level, and the way out of a fault."""

    name: str
    level: Level
    text: str
    hint: str = ""


def judged(name: str, text: str, hint: str = "", level: Level = "warn") -> Finding:
    """Return a finding: ok if there is nothing to do about it, else of a level."""
    return Finding(name, level if hint else "ok", text, hint)


def judge_values(
    kind: str, values: Mapping[str, Any], sound: Mapping[str, tuple[Container[Any], str]]
) -> Iterator[Finding]:
    """Judge settings that decide whether jobs are safe and claims stay fast."""
    for name, value in values.items():
        good, hint = sound[name]
        yield judged(f"{kind} {name}", str(value), "" if value in good else hint)


def _doctor(options: argparse.Namespace, out: Output) -> int:
    """Show versions, the engine and its pragmas, the log, the writer gate, the workers, the clock,
    migrations, disk space and the system checks; each ok, warn or fail with the way out. Exits
    with 1 if anything fails.
    """
    found = [*_versions(), *_system_checks()]
    if not _any_fails(found):
        # After a fault of the settings the other examinations would report it again.
        path = _path()
        for examine in _EXAMINATIONS:
            if examine not in _OF_FILE:
                found += _attempt(examine)
            elif path is not None:
                found += _attempt(examine, path)
            if found[-1].hint == NOT_REACHED:
                break  # the others would report this again
    out.data(ok=not _any_fails(found), findings=[asdict(finding) for finding in found])
    width = max(len(finding.name) for finding in found)
    for finding in found:
        line = f"{finding.level:<4}  {finding.name:<{width}}  {finding.text}"
        out.line(line, STYLES[finding.level])
        if finding.hint:
            out.line(f"{'':<4}  {'':<{width}}  → {finding.hint}", "dim")
    return 1 if _any_fails(found) else 0


def _any_fails(found: list[Finding]) -> bool:
    return any(finding.level == "fail" for finding in found)


def _attempt(examine: Callable[..., Iterator[Finding]], *place: str) -> list[Finding]:
    """Run one examination. An error of it is a finding, too."""
    try:
        return list(examine(*place))
    except (*store.UNREADABLE, InterfaceError, OSError) as error:
        name = examine.__name__.strip("_")
        text = " ".join(line.strip() for line in str(error).splitlines())
        return [Finding(name, "fail", text, _way_out(error))]


def _way_out(error: Exception) -> str:
    if isinstance(error, Error):
        connection = connections[conf.get().database]
        if dialect_for(connection).diagnose(error) == "lost":
            return NOT_REACHED
    return "Run manage.py migrate if tables are missing, else relay verify."


def _versions() -> Iterator[Finding]:
    yield Finding("relay", "ok", relay_queue.__version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()}")
    yield Finding("django", "ok", django.get_version())
    yield Finding("tasks framework", "ok", _tasks_framework())
    yield Finding("sqlite", "ok", sqlite3.sqlite_version)


def _tasks_framework() -> str:
    package = compat.BaseTaskBackend.__module__.partition(".")[0]
    try:
        return f"{package} {version(package.replace('_', '-'))}"
    except PackageNotFoundError:
        return package


def _system_checks() -> Iterator[Finding]:
    messages = checks.run_checks(tags=[TAG])
    for message in messages:
        fails, warns = message.level >= checks.ERROR, message.level >= checks.WARNING
        level: Level = "fail" if fails else "warn" if warns else "ok"
        yield Finding(f"check {message.id}", level, str(message.msg), message.hint or "")
    if not messages:
        yield Finding("system checks", "ok", "nothing to say")


def _path() -> str | None:
    return database_path(conf.get().database)


def _engine() -> Iterator[Finding]:
    alias = conf.get().database
    engine = connections[alias].settings_dict["ENGINE"]
    is_sound = _path() is None or engine == RELAY_ENGINE
    hint = "" if is_sound else f'Use ENGINE "{RELAY_ENGINE}": writers take turns.'
    yield judged("engine", f"{engine}, alias {alias}", hint)


def _server() -> Iterator[Finding]:
    found = server.read_server()
    if found is None:
        return
    yield Finding("server", "ok", found.version)
    connection: Any = connections[conf.get().database]
    driver = connection.Database
    yield Finding("driver", "ok", f"{driver.__name__} {driver.__version__}")
    yield from judge_values("setting", found.settings, SERVER_SETTINGS)
    yield from judge_load(found)


def judge_load(found: server.Server) -> Iterator[Finding]:
    """Judge the load of a server, its role and its clock, which change from hour to hour."""
    if found.standby:
        yield judged("role", "standby", "It takes no writes. Point DATABASES at the primary.")
    yield _oldest_transaction(found)
    free = found.max_connections - found.connections
    few = free < found.max_connections * FEW_CONNECTIONS_LEFT
    hint = "New workers and requests will be refused. Raise max_connections, or use a pooler."
    text = f"{found.connections} of {found.max_connections}"
    yield judged("connections", text, hint if few else "")
    ahead = found.clock_ahead_seconds
    if abs(ahead) > CLOCK_SLACK_SECONDS:
        text = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine"
        hint = "Leases follow the server's clock; compare logs with care."
        yield judged("server clock", text, hint)


def _oldest_transaction(found: server.Server) -> Finding:
    if found.oldest_transaction_at is None:
        return judged("oldest transaction", "none")
    age = found.now - found.oldest_transaction_at
    hint = "Dead rows that it might still see cannot be swept, so claims get slower. End it."
    text = str(duration(max(0.0, age.total_seconds())))
    return judged("oldest transaction", text, hint if age > OLD_TRANSACTION else "")


def _sequences() -> Iterator[Finding]:
    """Compare each sequence with its table: after logical replication it may be far behind."""
    if server.read_server() is None:
        return
    behind = list(server.sequences_behind())
    for table, given, highest in behind:
        text = f"has given {given:,}, and the highest id is {highest:,}"
        yield Finding(f"sequence of {table}", "fail", text, SEQUENCE_BEHIND)
    if not behind:
        yield Finding("sequences", "ok", "none is behind its table")


def _pragmas(path: str) -> Iterator[Finding]:
    values = pragmas(PRAGMAS)
    values["synchronous"] = SYNCHRONOUS[values["synchronous"]]
    yield from judge_values("pragma", values, PRAGMAS)


def _log(path: str) -> Iterator[Finding]:
    try:
        size = os.stat(os.path.realpath(path) + "-wal").st_size
    except FileNotFoundError:
        size = 0
    hint = "Some reader holds an old snapshot, so the log cannot be reused. Look for long queries."
    yield judged("log", _megabytes(size), hint if size > LARGE_LOG_BYTES else "")


def _file(path: str) -> Iterator[Finding]:
    """Check that the file can be read, and that no other file has replaced it while in use."""
    connection = connections[conf.get().database]
    dialect_for(connection).check_file(connection)
    newest = Job.objects.using(connection.alias).order_by("-id").values_list("id", flat=True)
    newest.first()  # raises what `_attempt` shows if the page cannot be read
    logs = replaced.logs_put_aside(path)
    if not logs:
        yield Finding("file", "ok", f"{path}, readable")
        return
    hint = (
        "What was committed last to the file that was there is only in its log. Run relay verify, "
        "then delete that log, or keep it with the old file. Stop everything before you restore."
    )
    text = f"{path} was replaced while it was in use; put aside: {', '.join(logs)}"
    yield judged("file", text, hint)


def _gate() -> Iterator[Finding]:
    gate = gate_of(connections[conf.get().database])
    if gate is None:
        return
    holder, limit = gate.holder(), conf.get().gate_hold_seconds
    late = holder is not None and time() - holder.since > limit
    hint = f"Everybody else waits. See what that process does; {limit:g} s is the limit for jobs."
    yield judged("gate", f"held by {holder}" if holder else "free", hint if late else "")


def _workers() -> Iterator[Finding]:
    path = _path()
    live = [w for w in status.workers(looks.now()) if w.row.stopped_at is None]
    if not live:
        hint = "Jobs wait until one is started: manage.py runworker."
        yield judged("workers", "no worker is running", hint)
    changed_at, module = _newest_code()
    for worker in live:
        row = worker.row
        yield judge_worker(worker, _verdict(path, row))
        if row.stop_reason:
            yield Finding(f"work of {row.id}", "fail", row.stop_reason, HINDERED)
        if row.version not in ("", relay_queue.__version__):
            text = f"Relay {row.version}, and this is {relay_queue.__version__}"
            yield judged(f"version of {row.id}", text, OTHER_VERSION)
        # Of another host neither the files nor the clock are known.
        if row.host == socket.gethostname() and row.started_at < changed_at:
            text = f"{module} was changed after the worker had started"
            yield judged(f"code of {row.id}", text, CHANGED_CODE)


def _newest_code() -> tuple[datetime, str]:
    """Return when the project's code was changed last, as far as this process has loaded it."""
    packages = tuple(f"{package}." for package in task_packages() - {"relay_queue"})
    newest = 0.0, ""
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(packages) and (path := getattr(module, "__file__", None)):
            with suppress(OSError):  # a module in an archive, or one that was removed
                newest = max(newest, (os.stat(path).st_mtime, name))
    return datetime.fromtimestamp(newest[0], UTC), newest[1]


def judge_worker(worker: status.WorkerStatus, verdict: Liveness) -> Finding:
    """Judge a worker by its lock and its heartbeat."""
    age = worker.heartbeat_age_seconds
    hint = ""
    if verdict is Liveness.DEAD:
        hint = "Other workers recover its jobs; if none runs, relay recover does."
    elif age > status.SILENT_SECONDS and verdict is Liveness.ALIVE:
        hint = "It lives but does nothing: stopped, or waiting for the database?"
    elif age > status.SILENT_SECONDS:
        hint = "Nothing proves it dead. Its leases end when they expire."
    text = f"{_called(worker.row)}: {verdict.value}, heartbeat {duration(age)} ago"
    return judged(f"worker {worker.row.id}", text, hint)


def _leases() -> Iterator[Finding]:
    """Look for leases that should have been ended long ago: no worker does it."""
    open_leases = Lease.objects.using(conf.get().database).filter(ended_at=None)
    now = looks.now()
    late = open_leases.filter(expires_at__lt=now - timedelta(seconds=status.SILENT_SECONDS))
    oldest = late.order_by("expires_at").values_list("expires_at", flat=True).first()
    if oldest is None:
        yield Finding("leases", "ok", "none is long overdue")
        return
    n = late[: MOST_COUNTED + 1].count()
    count = f"more than {MOST_COUNTED:,}" if n > MOST_COUNTED else f"{n:,}"
    text = f"{count} long overdue, the oldest for {duration((now - oldest).total_seconds())}"
    yield judged("leases", text, NOT_RECOVERED)


def _queues() -> Iterator[Finding]:
    """Name the queues whose jobs wait for a worker that nobody has started."""
    now = looks.now()
    for name in status.unserved(status.queues(now), status.workers(now)):
        yield judged(f"queue {short(name)}", "jobs wait, and no worker serves it", START_ONE)


def _called(worker: Worker) -> str:
    return f"{short(worker.name)} ({short(worker.host)}, pid {worker.pid})"


def _verdict(path: str | None, worker: Worker) -> Liveness:
    if worker.session_lock:
        key = lock_key(worker.incarnation)
        if key is None:
            return Liveness.UNKNOWN
        return Liveness.DEAD if looks.unlocked([key]) else Liveness.ALIVE
    if path is None:
        return Liveness.UNKNOWN
    identity = NO_LOCK
    if worker.lock_device is not None and worker.lock_inode is not None:
        identity = LockIdentity(worker.lock_device, worker.lock_inode)
    # Closed at once: an open probe of a dead worker would keep other workers from recovering it.
    with probe(path, worker.incarnation, identity) as found:
        return found.verdict


def _clock() -> Iterator[Finding]:
    now = looks.now()
    text, hint = f"{now:%Y-%m-%d %H:%M:%S} UTC", ""
    newest = Worker.objects.using(conf.get().database).order_by("-heartbeat_at").first()
    ahead = 0.0 if newest is None else (newest.heartbeat_at - now).total_seconds()
    if newest is not None and ahead > CLOCK_SLACK_SECONDS:
        text += f"; worker {_called(newest)} was heard {duration(ahead)} in the future"
        hint = "A clock was set back, or two machines disagree. Leases last that much longer."
    yield judged("clock", text, hint)


def _migrations() -> Iterator[Finding]:
    executor = MigrationExecutor(connections[conf.get().database])
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "relay_queue"]
    pending = [f"{m.app_label}.{m.name}" for m, _ in executor.migration_plan(targets)]
    text = f"not applied: {', '.join(pending)}" if pending else "all applied"
    yield judged("migrations", text, "Run manage.py migrate." if pending else "", "fail")


def _disk(path: str) -> Iterator[Finding]:
    free = shutil.disk_usage(os.path.dirname(os.path.realpath(path))).free
    hint = "Make room: with a full disk nothing can be enqueued or acked."
    level: Level = "fail" if free < NO_DISK_BYTES else "warn"
    yield judged("disk", f"{_megabytes(free)} free", hint if free < LOW_DISK_BYTES else "", level)


def _megabytes(n: int) -> str:
    return f"{n / 1024**2:,.1f} MiB"


_OF_FILE: Final = (_file, _pragmas, _log, _disk)
"""The examinations that are given the path of the database, and left out if it is no file."""

_EXAMINATIONS: Final[tuple[Callable[..., Iterator[Finding]], ...]] = (
    _engine,
    _file,
    _server,
    _sequences,
    _pragmas,
    _log,
    _gate,
    _workers,
    _queues,
    _leases,
    _clock,
    _migrations,
    _disk,
)

VERBS: Final = {"doctor": Verb(_doctor)}
"""The verb by its name."""
