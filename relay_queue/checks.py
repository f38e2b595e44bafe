"""System checks: what ``manage.py check`` says about Relay's settings and surroundings.

They read settings and the operating system, and never query the database; ``relay doctor`` does
that.

===================== ============================================================================
Id                    What it says
===================== ============================================================================
``relay_queue.E001``  A key of ``RELAY`` is unknown, or its value is out of bounds.
``relay_queue.E002``  ``RELAY["DATABASE"]`` is not an alias of ``DATABASES``.
``relay_queue.E003``  The database engine of the queue is not supported.
``relay_queue.E004``  ``USE_TZ`` is off.
``relay_queue.E005``  ``TASKS`` names a queue that ``RELAY["QUEUES"]`` does not list.
``relay_queue.E006``  ``OPTIONS`` of an alias in ``TASKS`` are not usable (told by the backend).
``relay_queue.E007``  ``TASKS`` uses Relay, which is not installed (told by the backend).
``relay_queue.W001``  No alias of ``TASKS`` uses Relay.
``relay_queue.W002``  The queue is on Django's own SQLite engine, so writers are not served fairly.
``relay_queue.W003``  Transactions do not begin as writers.
``relay_queue.W004``  The settings do not keep a write-ahead log.
``relay_queue.W005``  Commits may be lost when the power fails.
``relay_queue.W006``  The SQLite library has the WAL-reset race, and the engine does not prevent it.
``relay_queue.W007``  This system has no ``fcntl``: no writer gate and no proof of death.
``relay_queue.W008``  The queue is in memory.
``relay_queue.W009``  The database file is on what is not known to be a local file system.
``relay_queue.W010``  The admin is installed and the package of its date filters is not.
``relay_queue.W011``  Transactions on PostgreSQL begin with a snapshot.
``relay_queue.I001``  The queue is in another database than ``default``.
===================== ============================================================================
"""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core import checks, mail
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.module_loading import import_string

from relay_queue import conf
from relay_queue.db.filename import database_path
from relay_queue.db.sqlite3.base import DatabaseWrapper as RelayEngine
from relay_queue.exceptions import ConfigurationError

TAG: Final = "relay_queue"

_ENGINE: Final = "relay_queue.db.sqlite3"
_POSTGRESQL: Final = "django.db.backends.postgresql"
READ_COMMITTED: Final = 2
"""The driver's number for the isolation level of that name."""
_BACKEND_MODULE: Final = "relay_queue.backend"
_MOUNTS: Final = "/proc/self/mounts"
# File systems of this machine's kernel on this machine's disks or memory. All others are warned of:
# most carry files of another machine, or of the host of a virtual one, and more are invented.
_LOCAL_FILE_SYSTEMS: Final = frozenset(
    {"apfs", "aufs", "bcachefs", "btrfs", "devtmpfs", "ecryptfs", "exfat", "ext2", "ext3", "ext4"}
    | {"f2fs", "hfs", "hfsplus", "jffs2", "jfs", "msdos", "nilfs2", "ntfs3", "overlay", "overlayfs"}
    | {"ramfs", "reiserfs", "rootfs", "simfs", "tmpfs", "ubifs", "udf", "ufs", "vfat", "xfs", "zfs"}
)
_UNSUPPORTED: Final = {
    "mysql": "MySQL and MariaDB are not supported. ",
    "oracle": "Oracle is not supported. ",
}


def register() -> None:
    """Register all checks of this module, once per process."""
    for check in (check_settings, check_tasks, check_database, check_platform, check_admin):
        checks.register(check, TAG)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Judge ``settings.RELAY`` as a whole, and ``USE_TZ``."""
    found: list[checks.CheckMessage] = [
        _error("E001", problem.message, problem.hint)
        for problem in conf.problems(getattr(settings, "RELAY", {}))
    ]
    if not settings.USE_TZ:
        found.append(
            _error(
                "E004",
                "USE_TZ is False, and Relay keeps its times in UTC.",
                "Set USE_TZ = True; TIME_ZONE may be what it is.",
            )
        )
    return found


def check_tasks(**_: Any) -> list[checks.CheckMessage]:
    """Compare ``settings.TASKS`` with Relay's own settings."""
    aliases = _relay_aliases()
    if not aliases:
        if hasattr(mail, "outbox") and _run_at_once_or_never():  # as the test runner leaves it
            return []
        hint = (
            'Set TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", '
            '"QUEUES": []}}.'
        )
        return [_warning("W001", "No alias of TASKS uses Relay, so nothing is enqueued.", hint)]
    relay = _settings()
    if relay is None or relay.queues is None:
        return []
    known = relay.queues
    return [
        _error(
            "E005",
            f'TASKS["{alias}"] admits the queue {name!r}, which RELAY["QUEUES"] does not list.',
            f"Add it there, or set the alias's QUEUES to some of {', '.join(sorted(known))}.",
        )
        for alias, params in aliases.items()
        for name in sorted(set(params.get("QUEUES", ["default"])) - set(known))
    ]


def check_database(**_: Any) -> list[checks.CheckMessage]:
    """Judge the database that holds the queue, by its settings."""
    relay = _settings()
    if relay is None:
        return []
    alias = relay.database
    if alias not in list(connections):
        hint = f"The aliases are {', '.join(sorted(connections))}."
        return [_error("E002", f'RELAY["DATABASE"] is {alias!r}, not in DATABASES.', hint)]
    found: list[checks.CheckMessage] = []
    if alias != DEFAULT_DB_ALIAS and not _all_wait_for_commit(alias):
        message = f'The queue is in the database {alias!r}, not in "{DEFAULT_DB_ALIAS}".'
        hint = (
            f'An enqueue commits with the rows written to {alias!r}, not with those of "default": '
            'it may stand although they were rolled back. Set "enqueue_on_commit" in OPTIONS of '
            "the aliases of TASKS, or enqueue in transaction.on_commit."
        )
        found.append(checks.Info(message, hint=hint, id=f"{TAG}.I001"))
    judge = _JUDGES.get(_vendor(alias), _unsupported)
    return [*found, *judge(alias)]


def check_platform(**_: Any) -> list[checks.CheckMessage]:
    """Judge the operating system."""
    if importlib.util.find_spec("fcntl"):
        return []
    message = "This system has no fcntl, so there is no writer gate and no proof of death."
    hint = "Run on Linux, macOS or BSD. Here only the end of a lease tells that a worker is gone."
    return [_warning("W007", message, hint)]


def check_admin(**_: Any) -> list[checks.CheckMessage]:
    """See whether the pages of the admin have what they are made with."""
    if not apps.is_installed("django.contrib.admin") or apps.is_installed("rangefilter"):
        return []
    message = (
        "The admin is installed, but rangefilter, the package of Relay's date filters, is not."
    )
    hint = 'Add "rangefilter" to INSTALLED_APPS; it comes with Relay.'
    return [_warning("W010", message, hint)]


def _error(number: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=hint, id=f"{TAG}.{number}")


def _warning(number: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=hint, id=f"{TAG}.{number}")


def _settings() -> conf.RelaySettings | None:
    """Return Relay's settings, or None if they are unusable, which E001 reports."""
    try:
        return conf.get()
    except ConfigurationError:
        return None


def _relay_aliases() -> dict[str, Mapping[str, Any]]:
    """Return the parameters of the aliases of ``TASKS`` that Relay backs."""
    tasks: Mapping[str, Mapping[str, Any]] = getattr(settings, "TASKS", {})
    return {alias: params for alias, params in tasks.items() if _is_relay(params.get("BACKEND"))}


def _run_at_once_or_never() -> bool:
    """Say whether all aliases of ``TASKS`` are of the framework's backends for tests."""
    tasks: Mapping[str, Mapping[str, Any]] = getattr(settings, "TASKS", {})
    names = {str(params.get("BACKEND")).rpartition(".")[2] for params in tasks.values()}
    return bool(names) and names <= {"ImmediateBackend", "DummyBackend"}


def _all_wait_for_commit(database: str) -> bool:
    """Say whether all aliases enqueue when another database than the queue's has committed."""
    options = [params.get("OPTIONS") for params in _relay_aliases().values()]
    asked = [given.get("enqueue_on_commit") for given in options if isinstance(given, Mapping)]
    if len(asked) < len(options):
        return False
    return bool(asked) and all(rows and rows != database for rows in asked)


def _is_relay(path: Any) -> bool:
    try:
        backend = import_string(path)
    except (ImportError, AttributeError, TypeError):
        return False  # Django's own check names a path that leads nowhere
    return any(base.__module__ == _BACKEND_MODULE for base in getattr(backend, "__mro__", ()))


def _vendor(alias: str) -> str:
    try:
        return connections[alias].vendor
    except (ImproperlyConfigured, ImportError):  # its driver is not installed
        return str(connections.settings[alias]["ENGINE"]).rpartition(".")[2]


def _unsupported(alias: str) -> Iterator[checks.CheckMessage]:
    engine = connections.settings[alias]["ENGINE"]
    hint = (
        f'{_UNSUPPORTED.get(_vendor(alias), "")}Use ENGINE "{_ENGINE}", or '
        f'"{_POSTGRESQL}" for workers on several machines.'
    )
    yield _error("E003", f"Relay cannot keep a queue with {engine!r}.", hint)


def _postgresql_messages(alias: str) -> Iterator[checks.CheckMessage]:
    if not importlib.util.find_spec("psycopg"):
        message = "Relay speaks to PostgreSQL through psycopg 3, which is not installed."
        hint = 'Install "django-relay-queue[postgres]"; Django prefers it to psycopg2.'
        yield _error("E003", message, hint)
        return
    options = connections.settings[alias].get("OPTIONS", {})
    where = f'DATABASES["{alias}"]["OPTIONS"]'
    level = options.get("isolation_level")
    if level is not None and int(level) > READ_COMMITTED:
        message = f"Transactions of {alias!r} begin with a snapshot (isolation level {level})."
        hint = (
            f'Remove {where}["isolation_level"]: an enqueue inside such a transaction may not see '
            "how full its queue is. Workers use READ COMMITTED whatever this says."
        )
        yield _warning("W011", message, hint)
    if re.search(r"synchronous_commit\s*=\s*['\"]?(off|false|no|0)\b", options.get("options", "")):
        message = "With synchronous_commit=off a commit may be lost with the server."
        yield _warning("W005", message, f'Remove it from {where}["options"].')


def _sqlite_messages(alias: str) -> Iterator[checks.CheckMessage]:
    path = database_path(alias)
    if path is None:
        if hasattr(mail, "outbox"):  # as the test runner leaves it: no worker comes to its database
            return
        message = f"The queue is in memory: the database {alias!r} has no file."
        hint = "Name a file in DATABASES. Workers are other processes and would see another queue."
        yield _warning("W008", message, hint)
        return
    yield from _engine_messages(alias)
    yield from _durability_messages(alias)
    kind = _file_system_of(path, _read_mounts())
    if kind is not None and kind not in _LOCAL_FILE_SYSTEMS:
        message = (
            f"The database file {path} is on {kind}, which is not known to be a local file system."
        )
        hint = (
            "Keep it on a local disk: over a network, from the host of a virtual machine or through "
            "FUSE, SQLite's log and Relay's locks may not work. If this one is on a disk of this "
            f'machine, add "{TAG}.W009" to SILENCED_SYSTEM_CHECKS.'
        )
        yield _warning("W009", message, hint)


def _engine_messages(alias: str) -> Iterator[checks.CheckMessage]:
    if isinstance(connections[alias], RelayEngine):
        return
    use = f'Set DATABASES["{alias}"]["ENGINE"] to "{_ENGINE}".'
    engine = connections.settings[alias]["ENGINE"]
    yield _warning("W002", f"With {engine!r} writers are not served in turn.", use)
    if _has_wal_reset_race(sqlite3.sqlite_version_info):
        message = (
            f"SQLite {sqlite3.sqlite_version} can damage the database when two connections "
            "commit and checkpoint at once."
        )
        hint = f"{use} It keeps them apart. Or use SQLite 3.51.3, 3.50.7, 3.44.6 or later."
        yield _warning("W006", message, hint)


def _durability_messages(alias: str) -> Iterator[checks.CheckMessage]:
    """Judge ``OPTIONS``, which go over the defaults of either engine."""
    options = connections.settings[alias].get("OPTIONS", {})
    has_defaults = isinstance(connections[alias], RelayEngine)
    where = f'DATABASES["{alias}"]["OPTIONS"]'
    mode = options.get("transaction_mode", "IMMEDIATE" if has_defaults else None)
    if str(mode).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        message = f"Transactions begin as {mode or 'DEFERRED'} and fail if another writer is first."
        yield _warning("W003", message, f'Set {where}["transaction_mode"] to "IMMEDIATE".')
    init_command = options.get("init_command", "")
    journal = _pragma(init_command, "journal_mode") or ("wal" if has_defaults else None)
    if journal != "wal":
        message = f"The settings of {alias!r} do not ask for a write-ahead log."
        hint = f'Add "PRAGMA journal_mode=WAL" to {where}["init_command"].'
        yield _warning("W004", message, hint)
    synchronous = _pragma(init_command, "synchronous") or "full"
    if synchronous not in {"full", "extra", "2", "3"}:
        message = f"With synchronous={synchronous.upper()} a commit may be lost with the power."
        yield _warning("W005", message, f'Set "PRAGMA synchronous=FULL" in {where}.')


_JUDGES: Final = {"sqlite": _sqlite_messages, "postgresql": _postgresql_messages}


def _pragma(init_command: str, name: str) -> str | None:
    """Return the last value that ``init_command`` gives a pragma, in lower case."""
    values = re.findall(rf"\b{name}\s*[=(]\s*['\"]?(\w+)", init_command, re.IGNORECASE)
    return values[-1].lower() if values else None


def _has_wal_reset_race(version: tuple[int, ...]) -> bool:
    """Say whether SQLite of this version can lose pages when a log is reset during a commit."""
    if version[:2] == (3, 44):
        return version < (3, 44, 6)
    if version[:2] == (3, 50):
        return version < (3, 50, 7)
    return (3, 7, 0) <= version < (3, 51, 3)


def _read_mounts() -> str:
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            return mounts.read()
    except OSError:
        return ""  # not Linux: nothing to tell


def _file_system_of(path: str, mounts: str) -> str | None:
    """Return the type of the file system that holds ``path``: the deepest mount above it."""
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        place, found = line.split()[1:3]
        # Spaces, tabs, line ends and backslashes are written in octal.
        place = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), place).rstrip("/") + "/"
        if real.startswith(place) and len(place) >= len(best):
            best, kind = place, found
    return kind
