"""What ``manage.py check`` says, by id, and that it never asks the database."""

import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import checks as django_checks
from django.core import mail
from django.db import connections

from relay_queue import backend, checks
from tests.conftest import ROOT

RELAY_BACKEND = "relay_queue.backend.RelayBackend"
DJANGO_ENGINE = "django.db.backends.sqlite3"
SAFE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous=FULL;",
}


def ids(messages: Any) -> list[str]:
    return [message.id.removeprefix("relay_queue.") for message in messages]


@pytest.fixture(autouse=True)
def sound_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that SQLite is a version without the race, whatever this machine has."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 51, 3))


@pytest.fixture
def database(
    tmp_path: Path, settings: Any
) -> Iterator[Callable[..., list[django_checks.CheckMessage]]]:
    """Return a function that checks a database configuration without opening the database."""
    path = tmp_path / "jobs.sqlite3"

    def forget() -> None:
        connections.settings.pop("jobs", None)
        if hasattr(connections._connections, "jobs"):
            del connections["jobs"]

    def check(**configuration: Any) -> list[django_checks.CheckMessage]:
        forget()
        defaults = connections.settings["default"]
        connections.settings["jobs"] = {**defaults, "NAME": path, "OPTIONS": {}, **configuration}
        settings.RELAY = {"DATABASE": "jobs"}
        found = checks.check_database()
        return [message for message in found if message.id != "relay_queue.I001"]

    yield check
    forget()
    assert not path.exists()


NOT_LOCAL = [
    "virtiofs",
    "fuse.grpcfuse",
    "fakeowner",
    "osxfs",
    "fuse.osxfs",
    "vboxsf",
    "vmhgfs",
    "fuse.vmhgfs-fuse",
    "prl_fs",
    "drvfs",
    "9p",
    "cifs",
    "nfs4",
    "nfs",
    "smb3",
    "fuse.sshfs",
    "fuse.rclone",
    "fuse.mergerfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "ceph",
    "glusterfs",
    "fuse.glusterfs",
    "lustre",
    "afs",
    "fuse",
    "fuseblk",
]


class TestSettings:
    def test_good_settings_say_nothing(self) -> None:
        assert checks.check_settings() == []

    def test_every_problem_of_relay_is_an_error_with_a_hint(self, settings: Any) -> None:
        settings.RELAY = {"CONCURRENCY": 0, "LEASE_SECOND": 3}
        found = checks.check_settings()
        assert ids(found) == ["E001", "E001"]
        assert "CONCURRENCY" in found[0].msg
        assert "LEASE_SECONDS" in found[1].hint

    def test_naive_times_are_an_error(self, settings: Any) -> None:
        settings.USE_TZ = False
        assert ids(checks.check_settings()) == ["E004"]

    def test_unusable_settings_are_reported_once(self, settings: Any) -> None:
        settings.RELAY = {"CONCURRENCY": 0}
        assert checks.check_database() == []
        assert "E005" not in ids(checks.check_tasks())


class TestTasks:
    @pytest.mark.parametrize(
        "tasks",
        [
            {},
            {"default": {}},
            {"default": {"BACKEND": "nowhere.at.All"}},
            {"default": {"BACKEND": "relay_queue.states.TERMINAL"}},
            {"default": {"BACKEND": "pathlib.Path"}},
        ],
    )
    def test_no_alias_with_relay_is_a_warning(self, settings: Any, tasks: dict) -> None:
        settings.TASKS = tasks
        (message,) = checks.check_tasks()
        assert ids([message]) == ["W001"]
        assert RELAY_BACKEND in message.hint

    def test_no_setting_at_all_is_a_warning(self, settings: Any) -> None:
        del settings.TASKS
        assert ids(checks.check_tasks()) == ["W001"]

    @pytest.mark.parametrize("name", ["immediate.ImmediateBackend", "dummy.DummyBackend"])
    def test_tests_with_the_frameworks_backends_are_not_warned(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        settings.TASKS = {"default": {"BACKEND": f"django.tasks.backends.{name}"}}
        assert checks.check_tasks() == []
        monkeypatch.delattr(mail, "outbox")
        assert ids(checks.check_tasks()) == ["W001"]

    def test_one_alias_with_relay_is_enough(self, settings: Any) -> None:
        settings.TASKS = {"other": {"BACKEND": RELAY_BACKEND}, "default": {"BACKEND": "x.Y"}}
        assert checks.check_tasks() == []

    def test_a_queue_that_relay_does_not_list_is_an_error(self, settings: Any) -> None:
        settings.TASKS = {"jobs": {"BACKEND": RELAY_BACKEND, "QUEUES": ["a", "b", "c"]}}
        settings.RELAY = {"QUEUES": ["a"]}
        found = checks.check_tasks()
        assert ids(found) == ["E005", "E005"]
        assert "'b'" in found[0].msg
        assert 'TASKS["jobs"]' in found[0].msg

    def test_an_alias_without_queues_admits_the_default_queue(self, settings: Any) -> None:
        settings.TASKS = {"default": {"BACKEND": RELAY_BACKEND}}
        settings.RELAY = {"QUEUES": ["mail"]}
        (message,) = checks.check_tasks()
        assert "'default'" in message.msg
        settings.RELAY = {"QUEUES": ["mail", "default"]}
        assert checks.check_tasks() == []

    def test_an_empty_list_of_queues_admits_those_that_relay_lists(self, settings: Any) -> None:
        settings.TASKS = {"default": {"BACKEND": RELAY_BACKEND, "QUEUES": []}}
        settings.RELAY = {"QUEUES": ["mail"]}
        assert checks.check_tasks() == []


class TestDatabase:
    def test_our_engine_with_its_defaults_says_nothing(self, database: Any) -> None:
        assert database() == []

    def test_an_unknown_alias_is_an_error_that_names_the_known_ones(self, settings: Any) -> None:
        settings.RELAY = {"DATABASE": "jbos"}
        (message,) = checks.check_database()
        assert ids([message]) == ["E002"]
        assert "default" in message.hint

    def test_another_database_than_default_is_said(self, database: Any) -> None:
        database()
        (message,) = checks.check_database()
        assert ids([message]) == ["I001"]
        assert "enqueue_on_commit" in message.hint

    def test_another_database_is_fine_where_enqueues_wait_for_the_commit(
        self, database: Any, settings: Any
    ) -> None:
        database()
        relay = {"BACKEND": "relay_queue.backend.RelayBackend"}
        waiting = {**relay, "OPTIONS": {"enqueue_on_commit": True}}
        settings.TASKS = {"default": waiting, "other": relay}
        assert ids(checks.check_database()) == ["I001"]
        settings.TASKS = {"default": waiting, "other": waiting}
        assert checks.check_database() == []

    @pytest.mark.parametrize(
        ("engine", "word"),
        [
            ("django.db.backends.mysql", "MySQL"),
            ("django.db.backends.oracle", "Oracle"),
            ("django.db.backends.dummy", "relay_queue.db.sqlite3"),
        ],
    )
    def test_another_vendor_is_an_error(self, database: Any, engine: str, word: str) -> None:
        (message,) = database(ENGINE=engine)
        assert ids([message]) == ["E003"]
        assert engine in message.msg
        assert word in message.hint

    def test_djangos_engine_is_a_warning_even_with_sound_options(self, database: Any) -> None:
        assert ids(database(ENGINE=DJANGO_ENGINE, OPTIONS=SAFE_OPTIONS)) == ["W002"]

    def test_djangos_defaults_are_warned_about_one_by_one(self, database: Any) -> None:
        assert ids(database(ENGINE=DJANGO_ENGINE)) == ["W002", "W003", "W004"]

    @pytest.mark.parametrize("mode", ["DEFERRED", None, "deferred"])
    def test_options_that_undo_immediate_transactions_are_a_warning(
        self, database: Any, mode: Any
    ) -> None:
        assert ids(database(OPTIONS={"transaction_mode": mode})) == ["W003"]

    @pytest.mark.parametrize("mode", ["IMMEDIATE", "exclusive"])
    def test_transactions_that_begin_as_writers_are_fine(self, database: Any, mode: str) -> None:
        assert database(OPTIONS={"transaction_mode": mode}) == []

    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("PRAGMA journal_mode=DELETE", ["W004"]),
            ("pragma journal_mode('wal'); pragma journal_mode = memory", ["W004"]),
            ("PRAGMA journal_mode=wal;", []),
            ("PRAGMA synchronous=NORMAL", ["W005"]),
            ("PRAGMA synchronous = 1", ["W005"]),
            ("PRAGMA synchronous(OFF)", ["W005"]),
            ("PRAGMA synchronous=NORMAL;PRAGMA synchronous=EXTRA", []),
            ("PRAGMA main.synchronous=2", []),
            ("PRAGMA cache_size=-8000", []),
        ],
    )
    def test_pragmas_that_give_up_durability_are_a_warning(
        self, database: Any, command: str, expected: list[str]
    ) -> None:
        assert ids(database(OPTIONS={"init_command": command})) == expected

    @pytest.mark.parametrize(
        ("version", "affected"),
        [
            ((3, 6, 23), False),
            ((3, 7, 0), True),
            ((3, 44, 5), True),
            ((3, 44, 6), False),
            ((3, 45, 3), True),
            ((3, 50, 6), True),
            ((3, 50, 7), False),
            ((3, 51, 2), True),
            ((3, 51, 3), False),
            ((3, 52, 0), False),
            ((4, 0, 0), False),
        ],
    )
    def test_a_library_with_the_race_is_a_warning_without_our_engine(
        self, database: Any, monkeypatch: Any, version: tuple[int, ...], affected: bool
    ) -> None:
        monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
        found = ids(database(ENGINE=DJANGO_ENGINE, OPTIONS=SAFE_OPTIONS))
        assert ("W006" in found) == affected
        assert database() == []

    @pytest.mark.parametrize("name", [":memory:", "file:jobs?mode=memory&cache=shared"])
    def test_a_database_in_memory_is_a_warning_but_for_a_test_runner(
        self, database: Any, monkeypatch: Any, name: str
    ) -> None:
        assert database(NAME=name) == []
        monkeypatch.delattr(mail, "outbox")
        assert ids(database(NAME=name)) == ["W008"]
        assert ids(database(NAME=name, ENGINE=DJANGO_ENGINE)) == ["W008"]

    @pytest.mark.parametrize("kind", [*NOT_LOCAL, "invented-tomorrow"])
    def test_a_file_on_what_is_not_known_to_be_local_is_a_warning(
        self, database: Any, monkeypatch: Any, tmp_path: Path, kind: str
    ) -> None:
        self.mount(monkeypatch, tmp_path, kind)
        (message,) = database()
        assert message.id == "relay_queue.W009"
        assert f" is on {kind}, " in message.msg
        assert 'add "relay_queue.W009" to SILENCED_SYSTEM_CHECKS' in message.hint

    @pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"])
    def test_a_file_on_a_local_file_system_is_no_warning(
        self, database: Any, monkeypatch: Any, tmp_path: Path, kind: str
    ) -> None:
        self.mount(monkeypatch, tmp_path, kind)
        assert database() == []

    @staticmethod
    def mount(monkeypatch: Any, tmp_path: Path, kind: str) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
        monkeypatch.setattr(checks, "_MOUNTS", str(mounts))

    def test_a_system_without_a_list_of_mounts_says_nothing(
        self, database: Any, monkeypatch: Any, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(checks, "_MOUNTS", str(tmp_path / "missing"))
        assert database() == []


class TestFileSystem:
    MOUNTS = "\n".join(
        [
            "/dev/sda / ext4 rw 0 0",
            "server:/data /data nfs rw 0 0",
            "/dev/sdb /data/local xfs rw 0 0",
            "server:/b /with\\040space nfs4 rw 0 0",
            "tmpfs /hidden tmpfs rw 0 0",
            "server:/c /hidden cifs rw 0 0",
        ]
    )

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/srv/db.sqlite3", "ext4"),
            ("/data/db.sqlite3", "nfs"),
            ("/data/local/db.sqlite3", "xfs"),
            ("/database/db.sqlite3", "ext4"),
            ("/with space/db.sqlite3", "nfs4"),
            ("/hidden/db.sqlite3", "cifs"),
        ],
    )
    def test_the_deepest_and_latest_mount_above_the_file_counts(self, path: str, kind: str) -> None:
        assert checks._file_system_of(path, self.MOUNTS) == kind

    def test_without_mounts_nothing_is_known(self) -> None:
        assert checks._file_system_of("/a", "") is None


class TestPlatform:
    def test_a_system_with_fcntl_says_nothing(self) -> None:
        assert checks.check_platform() == []

    def test_a_system_without_fcntl_is_a_warning(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert ids(checks.check_platform()) == ["W007"]


def test_the_checks_run_with_manage_py_check() -> None:
    registered = django_checks.registry.registry.get_checks()
    ours = {checks.check_settings, checks.check_tasks, checks.check_database, checks.check_platform}
    assert ours <= set(registered)


def test_the_framework_asks_the_backends_for_their_options(settings: Any) -> None:
    options = {"max_attempts": 0}
    settings.TASKS = {
        "default": {"BACKEND": "relay_queue.backend.RelayBackend", "OPTIONS": options}
    }
    assert "relay_queue.E006" in [message.id for message in django_checks.run_checks()]


@pytest.mark.parametrize(
    "options", [{"max_attempts": 0}, {"attempts": 5}, {"enqueue_on_commit": 3}]
)
def test_check_tells_unusable_options_though_the_urlconf_imports_tasks(
    tmp_path: Path, options: dict[str, int]
) -> None:
    (tmp_path / "odd.py").write_text(
        "from tests.settings import *\n"
        f"TASKS['default'] = {{**TASKS['default'], 'OPTIONS': {options!r}}}\n"
        "ROOT_URLCONF = 'odd_urls'\n"
    )
    (tmp_path / "odd_urls.py").write_text("import odd_chores\nurlpatterns = []\n")
    (tmp_path / "odd_chores.py").write_text(
        "from relay_queue.task import task\n@task(queue_name='mail')\ndef chore(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "django", "check"],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "DJANGO_SETTINGS_MODULE": "odd",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "(relay_queue.E006) TASKS['default']['OPTIONS'] is not usable" in done.stderr
    assert next(iter(options)) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_backend_without_its_app_is_named_by_check_and_by_enqueue(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        "from tests.settings import *\n"
        "INSTALLED_APPS = [name for name in INSTALLED_APPS if 'django_tasks' in name]\n"
        "ROOT_URLCONF = None\n"
    )
    (tmp_path / "chores.py").write_text(
        "from relay_queue.compat import task\n@task\ndef chore(): pass\n"
    )
    script = (
        "import django; django.setup(); import chores\n"
        "from django.core import checks\n"
        "print([message.id for message in checks.run_checks()])\n"
        "chores.chore.enqueue()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "DJANGO_SETTINGS_MODULE": "bare",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "['relay_queue.E007']"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("relay_queue.exceptions.ConfigurationError: TASKS['default'] uses Relay")
    assert 'Add "relay_queue" to INSTALLED_APPS' in last


def test_every_id_in_the_code_is_in_the_table_and_the_other_way_round() -> None:
    source = Path(checks.__file__).read_text()
    table = set(re.findall(r"``relay_queue\.([EWI]\d{3})``", checks.__doc__ or ""))
    source += Path(backend.__file__).read_text()  # E006 is the backend's own
    used = set(re.findall(r"\b[EWI]\d{3}\b", source.replace(checks.__doc__ or "", "")))
    assert table == used


@pytest.mark.parametrize(
    ("installed", "warned"),
    [
        (["django.contrib.admin"], True),
        (["django.contrib.admin", "rangefilter"], False),
        ([], False),
    ],
)
def test_the_admin_needs_the_package_of_its_date_filters(
    installed: list[str], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.apps, "is_installed", installed.__contains__)
    assert ids(checks.check_admin()) == (["W010"] if warned else [])
