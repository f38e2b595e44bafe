"""Fixtures for tests with real processes and real database files."""

import gc
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import psycopg
import pytest
from django.db import connections

from tests import postgresql
from tests.power.shim import compile_shim

ROOT = Path(__file__).resolve().parent.parent
DATABASE_VARIABLE = postgresql.DATABASE_VARIABLE

SHARE_VARIABLE = "RELAY_TEST_SHARE"

# What talks to Django's own interfaces: see `pytest_collection_modifyitems`.
ON_EVERY_PYTHON = re.compile(r"^tests/(unit|conformance)/|^tests/test_readme\.")

# How long a process that was told to stop may take before it is killed, in seconds.
STOP_SECONDS = 45.0

# How long to wait for what should happen soon, in seconds: on a machine with ten times the work
# that it has processors for, a process takes that much longer to start.
PATIENCE_SECONDS = 60.0

# Helpers of Python's multiprocessing live as long as the process that first needed them.
LONG_LIVED_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    """Open the run in the process that the others are started by; refuse what cannot be tested."""
    # Under nohup and behind a script's "&" they are ignored, and every process would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A run starts hundreds of processes, and each would compile all of Relay for itself.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput"):
        return
    if postgresql.wanted() and postgresql.binaries() is None:
        raise pytest.UsageError(postgresql.MISSING)
    run = postgresql.Run()
    config.add_cleanup(run.close)


@pytest.hookimpl(tryfirst=True)  # before items are left out for their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what only the build runs, and leave out what another Python runs."""
    mark_second_engine(items)
    leave_out_shared(config, items)


def mark_second_engine(items: list[pytest.Item]) -> None:
    """Mark a test of real processes as thorough on PostgreSQL, if it runs on a file, too.

    These take much of the time of all tests. What an engine does otherwise is held by the
    contract suite of the store, which always runs on both.
    """
    slow = [item for item in items if item.nodeid.startswith(("tests/process/", "tests/cli/"))]
    engines = {item: getattr(item, "callspec", None) for item in slow}
    of = {item: spec.params.get("engine") for item, spec in engines.items() if spec is not None}
    on_files = {without_parameters(item) for item, engine in of.items() if engine == "sqlite"}
    for item, engine in of.items():
        if engine == "postgresql" and without_parameters(item) in on_files:
            item.add_marker("thorough")


def without_parameters(item: pytest.Item) -> str:
    """Return a test without its parameters."""
    return item.nodeid.partition("[")[0]


def leave_out_shared(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the shared tests of another Python: ``RELAY_TEST_SHARE=1/2`` keeps the first half.

    A build runs on two Pythons and has 25 minutes. The tests closest to the framework run on
    both; of the others, which try databases, browsers and processes, each runs on one of them.
    Without the variable every test runs.
    """
    share = os.environ.get(SHARE_VARIABLE)
    if not share:
        return
    number, _, of = share.partition("/")
    others = {
        item
        for item in items
        if not ON_EVERY_PYTHON.search(item.nodeid)
        and crc32(together(item).encode()) % int(of) != int(number) - 1
    }
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def together(item: pytest.Item) -> str:
    """Return what a test has in common with those that should run where it runs.

    The tests of a group use one browser, one server or one run of mypy.
    """
    group = item.get_closest_marker("xdist_group")
    return str(group.args[0]) if group else item.nodeid


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly that a whole engine was left out."""
    if not postgresql.wanted():
        terminalreporter.write_sep("!", "NOT TESTED on PostgreSQL", yellow=True)
        if postgresql.binaries() is None:
            terminalreporter.write_line(postgresql.MISSING)


def wait_until(
    predicate: Callable[[], T],
    timeout: float = PATIENCE_SECONDS,
    message: str | Callable[[], str] = "",
    interval: float = 0.01,
) -> T:
    """Poll ``predicate`` until it is true and return what it returned.

    ``timeout`` and ``interval`` are in seconds. Raises ``AssertionError`` with ``message`` (a
    text, or a function called at the end that describes the state) when the time is over.
    """
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            detail = message() if callable(message) else message
            raise AssertionError(f"not within {timeout:g} s: {detail or predicate}")
        time.sleep(interval)
    return value


class Project:
    """The suite's Django project on one database, run as separate processes.

    ``database`` is a file or a ``postgresql://`` address. Every process it starts carries it in its
    environment, and so do their children: that is how ``close`` finds what was left running,
    whoever its parent is by then.
    """

    def __init__(self, database: Path | str, logs: Path) -> None:
        self.database = database
        self.logs = logs
        self._spawned: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process of this project."""
        return {
            **os.environ,
            DATABASE_VARIABLE: str(self.database),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def manage(
        self, *arguments: str, check: bool = True, timeout: float = 2 * PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run ``manage.py`` to its end. Raises ``AssertionError`` when ``check`` and it failed."""
        return self._run(["manage.py", *arguments], check, timeout)

    def python(
        self,
        source: str,
        *arguments: str,
        check: bool = True,
        timeout: float = 2 * PATIENCE_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``source`` in a process of its own, with Django set up. Fails like ``manage``."""
        setup = "import django; django.setup()\n"
        return self._run(["-c", setup + source, *arguments], check, timeout)

    def spawn(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start ``manage.py`` in the background; ``close`` stops it if the test did not.

        Its output goes to ``log(process)``. It leads a process group of its own, so that a test
        can signal the whole group as a terminal does.
        """
        return self._start([sys.executable, "manage.py", *arguments], options)

    def spawn_python(self, source: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start ``source`` in the background, with Django set up."""
        setup = "import django; django.setup()\n"
        return self._start([sys.executable, "-c", setup + source, *arguments], options)

    def log(self, process: subprocess.Popen[bytes]) -> str:
        """Return what a spawned process has written so far, output and errors together."""
        path = self._log_path(self._spawned.index(process))
        return path.read_text(errors="replace") if path.exists() else ""

    def rows(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Read the database with its own driver alone, past Relay and Django."""
        if isinstance(self.database, str):
            with psycopg.connect(self.database, autocommit=True) as server:
                return server.execute(sql.encode(), parameters).fetchall()
        with closing(sqlite3.connect(self.database, timeout=30)) as connection:
            return connection.execute(sql, parameters).fetchall()

    def pids(self) -> dict[int, str]:
        """Return the live processes of this project, as process id to command line."""
        return processes_with(f"{DATABASE_VARIABLE}={self.database}")

    def stop(self, process: subprocess.Popen[bytes], timeout: float = STOP_SECONDS) -> int:
        """End one process: first politely, after ``timeout`` seconds by force."""
        if process.poll() is None:
            process.terminate()
            # A stopped process would never see the signal.
            process.send_signal(signal.SIGCONT)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        """End every process of this project. Raises ``AssertionError`` if one had to be hunted."""
        for process in reversed(self._spawned):
            self.stop(process)
        strays = self._wait_for_strays()
        for pid in strays:
            _kill(pid)
        assert not strays, f"left running by {self.database}: {strays}"

    def _run(
        self, arguments: list[str], check: bool, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def _start(self, command: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
        self.logs.mkdir(parents=True, exist_ok=True)
        environment = {**self.environment, **options.pop("env", {})}
        with self._log_path(len(self._spawned)).open("wb") as log:
            defaults: dict[str, Any] = {
                "cwd": ROOT,
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
            }
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, env=environment, **{**defaults, **options}
            )
        self._spawned.append(process)
        return process

    def _log_path(self, index: int) -> Path:
        return self.logs / f"process-{index}.log"

    def _wait_for_strays(self) -> dict[int, str]:
        """Give orphans of a killed parent a moment to notice; return those that did not."""
        deadline = time.monotonic() + STOP_SECONDS
        while (strays := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return strays


def processes_with(variable: str) -> dict[int, str]:
    """Return live processes, other than this one, whose environment holds ``variable``."""
    needle = variable.encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = _command_line(entry)
        except OSError:
            # It ended between the listing and the reading, or belongs to someone else.
            continue
    found.pop(os.getpid(), None)
    return found


def _command_line(entry: Path) -> str:
    return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def children_of_this_process() -> dict[int, str]:
    """Return this process's children, dead but unreaped ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The parent's id is the second field after the command, which is in parentheses.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found[int(entry.name)] = _command_line(entry)
        except OSError:
            continue
    return {
        pid: line
        for pid, line in found.items()
        if not any(name in line for name in LONG_LIVED_CHILDREN)
    }


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the test that leaves a child process, running or unreaped."""
    before = children_of_this_process()
    yield
    left = {pid: line for pid, line in children_of_this_process().items() if pid not in before}
    for pid in left:
        _kill(pid)
        os.waitpid(pid, 0)
    assert not left, f"child processes left behind: {left}"


@pytest.fixture
def files_stay_open() -> Iterator[None]:
    """Keep the garbage collector from closing what other tests left, while files are counted."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def migrated_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a migrated, closed database file, to be copied and never opened."""
    directory = tmp_path_factory.mktemp("template")
    project = Project(directory / "relay.sqlite3", directory / "logs")
    project.manage("migrate", "--verbosity", "0")
    wal = directory / "relay.sqlite3-wal"
    assert not wal.exists(), "the last close should have checkpointed the log"
    return directory / "relay.sqlite3"


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled shim between SQLite and the system; skips where that cannot be."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def database_file(migrated_template: Path, tmp_path: Path) -> Path:
    """Return a migrated database file of this test's own."""
    return Path(shutil.copyfile(migrated_template, tmp_path / "relay.sqlite3"))


@pytest.fixture
def project(database_file: Path, tmp_path: Path) -> Iterator[Project]:
    """Return the project on a scratch file, for tests whose work is all done by processes."""
    project = Project(database_file, tmp_path / "logs")
    yield project
    project.close()


@pytest.fixture(scope="session")
def postgresql_server() -> postgresql.Server:
    """Return the PostgreSQL server of this run, with a migrated template."""
    if not postgresql.wanted():
        pytest.skip("NOT TESTED on PostgreSQL")
    return postgresql.shared()


@pytest.fixture
def postgresql_url(postgresql_server: postgresql.Server) -> Iterator[str]:
    """Return the address of a migrated database of this test's own."""
    name = f"test_{uuid.uuid4().hex}"
    yield postgresql_server.create(name)
    postgresql_server.drop(name)


@pytest.fixture
def postgresql_project(postgresql_url: str, tmp_path: Path) -> Iterator[Project]:
    """Return the project on a scratch database of PostgreSQL, for tests with processes."""
    project = Project(postgresql_url, tmp_path / "logs")
    yield project
    project.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest) -> str:
    """Name the engine of the database that holds the queue and the caller's rows."""
    return str(request.param)


@pytest.fixture(scope="session")
def server_database(postgresql_server: postgresql.Server) -> Iterator[str]:
    """Return the address of a database of this process's own, for `each_engine`."""
    name = f"engines_{uuid.uuid4().hex}"
    yield postgresql_server.create(name)
    postgresql_server.drop(name)


@pytest.fixture
def each_engine(
    engine: str, request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any
) -> Iterator[None]:
    """Real transactions on each engine in turn, with its database behind the alias "default".

    Afterwards the tables are emptied. A module takes it in under the name of ``transactional_db``,
    by which pytest-django knows that there must be a database.
    """
    from django.contrib.auth.models import Group

    from tests.store.actions import empty

    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())
        if engine == "postgresql":
            stack.enter_context(postgresql.default_is(request.getfixturevalue("server_database")))
        yield
        Group.objects.all().delete()
        empty()


@pytest.fixture
def live_project(transactional_db: None, tmp_path: Path) -> Iterator[Project]:
    """Return the project on the test database itself, shared with the test's own connection."""
    from django.db import connection

    project = Project(Path(connection.settings_dict["NAME"]), tmp_path / "logs")
    yield project
    project.close()


@pytest.fixture(scope="session")
def postgresql_alias(postgresql_server: postgresql.Server, worker_id: str) -> Iterator[str]:
    """Add a database of this process's own to the settings, and return its alias."""
    alias, name = "postgresql", f"relay_{worker_id}"
    postgresql_server.create(name)
    entry = {**connections.settings["default"], **postgresql_server.settings(name), "OPTIONS": {}}
    connections.settings[alias] = entry
    yield alias
    connections[alias].close()
    del connections.settings[alias]
    postgresql_server.drop(name)


@pytest.fixture(autouse=True)
def _forget_tasks() -> Iterator[None]:
    """Forget after each test which tasks were found: it may have put others in their place."""
    from relay_queue.task import resolve

    yield
    resolve.cache_clear()
