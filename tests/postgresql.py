"""A PostgreSQL server that the tests start themselves: private, throw-away, and gone afterwards.

`shared` is the one server of a run, for all of pytest-xdist's processes; it is started by whoever
asks first. A test about restarts or durability makes a `Server` of its own.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

ROOT = Path(__file__).resolve().parent.parent
DATABASE_VARIABLE = "RELAY_TEST_DB"
ENGINES_VARIABLE = "RELAY_TEST_ENGINES"
RUN_VARIABLE = "RELAY_TEST_RUN"

USER = "relay"
TEMPLATE = "relay_template"
"""A migrated database; copying it is much faster than migrating another."""

START_SECONDS = 60.0

MISSING = (
    "PostgreSQL's programs (initdb, postgres) are not on this machine: nothing is tested on "
    "PostgreSQL. Install it (apt-get install postgresql), or name the folder of its programs in "
    "PATH."
)

SETTINGS: Mapping[str, str] = {
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
    "timezone": "UTC",
}
# The data is thrown away with the server: nothing needs to reach the disk.
THROW_AWAY: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}

SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


@cache
def binaries() -> Path | None:
    """Return the folder of PostgreSQL's server programs, the newest there is, or None."""
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True
    )
    if shutil.which("pg_config"):
        told = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=True)
        folders.insert(0, Path(told.stdout.strip()))
    folders += [Path(entry) for entry in os.get_exec_path()]
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


def wanted() -> bool:
    """Whether to test on PostgreSQL: where it is named, or, if nothing is said, where it is."""
    named = os.environ.get(ENGINES_VARIABLE)
    if named is None:
        return binaries() is not None
    return "postgresql" in named.split(",")


class Server:
    """One server in a folder, reachable through a Unix socket there and, if asked, on loopback.

    ``durable`` keeps the promises of a real one; without it nothing is ever synced. ``port`` opens
    it on 127.0.0.1, too. Both ends of its life are in this process: `start` and `stop`.
    """

    def __init__(self, folder: Path, *, durable: bool = False, port: int | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.durable = durable
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: str) -> None:
        """Make the cluster if there is none, start the server, and wait until it answers.

        ``settings`` are for ``postgresql.conf``. Raises ``AssertionError`` with the server's log.
        """
        programs = binaries()
        assert programs is not None, MISSING
        if not self.data.exists():
            self._make_cluster(programs)
        chosen = {
            **SETTINGS,
            **({} if self.durable else THROW_AWAY),
            "unix_socket_directories": str(self.folder),
            "listen_addresses": "127.0.0.1" if self.port else "",
            "port": str(self.port or 5432),
            **settings,
        }
        arguments = [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(programs / "postgres"), "-D", str(self.data), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._unprivileged(),
            )
        self._wait_until_it_answers()

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """End the server; ``immediate`` is as good as a crash: it recovers at the next start."""
        if self._process is None:
            return
        self._process.send_signal(SIGNALS[mode])
        self._process.wait(START_SECONDS)
        self._process = None

    def restart(self, mode: Literal["fast", "immediate"] = "fast", **settings: str) -> None:
        """Stop the server and start it again on the same data."""
        self.stop(mode)
        self.start(**settings)

    def settings(self, database: str) -> dict[str, Any]:
        """Return an entry of ``DATABASES``."""
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database,
            "USER": USER,
            "HOST": str(self.folder),
            "PORT": str(self.port or 5432),
        }

    def url(self, database: str) -> str:
        """Return the address of a database, for `tests.settings` and for psycopg."""
        return f"postgresql://{USER}@/{database}?host={quote(str(self.folder), safe='')}&port={self.port or 5432}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """Open a connection in autocommit mode, past Relay and Django."""
        return psycopg.connect(self.url(database), autocommit=True)

    def create(self, database: str, template: str = TEMPLATE) -> str:
        """Create a database as a copy of a template, and return its address."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
        # Only one may copy a template at a time.
        with self._locked("create"), self.connect() as connection:
            connection.execute(statement.format(sql.Identifier(database), sql.Identifier(template)))
        return self.url(database)

    def drop(self, database: str) -> None:
        """Drop a database, whoever is still connected to it."""
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
        with self.connect() as connection:
            connection.execute(statement.format(sql.Identifier(database)))

    def migrate(self) -> None:
        """Make the template: an empty database of the suite's project."""
        self.drop(TEMPLATE)  # one that was begun and not finished
        self.create(TEMPLATE, "template0")
        environment = {
            **os.environ,
            DATABASE_VARIABLE: self.url(TEMPLATE),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, done.stderr

    def log(self) -> str:
        """Return what the server has said."""
        return (self.folder / "log").read_text(errors="replace")

    def _make_cluster(self, programs: Path) -> None:
        if os.geteuid() == 0:
            account = _account()
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        options = ["-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync"]
        done = subprocess.run(
            [str(programs / "initdb"), *options, "--locale=C"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **self._unprivileged(),
        )
        assert not done.returncode, f"initdb failed:\n{done.stdout}\n{done.stderr}"

    def _unprivileged(self) -> dict[str, Any]:
        """Return what makes a subprocess run as somebody else than root, whom PostgreSQL refuses."""
        options: dict[str, Any] = {"cwd": self.folder, "env": {**os.environ, "LC_ALL": "C"}}
        if os.geteuid() == 0:
            account = _account()
            options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        return options

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError as error:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise AssertionError(f"PostgreSQL did not start:\n{self.log()}") from error
            time.sleep(0.02)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with locked(self.folder / f"{name}.lock"):
            yield


@contextmanager
def default_is(url: str) -> Iterator[None]:
    """Let the alias "default" be a database of PostgreSQL in this process."""
    from django.db import connections  # those who only start a server need no settings

    named = conninfo_to_dict(url)
    entry, handle = connections.settings["default"], connections["default"]
    connections.settings["default"] = {
        **entry,
        "ENGINE": "django.db.backends.postgresql",
        "NAME": named["dbname"],
        "USER": named["user"],
        "HOST": named["host"],
        "PORT": named["port"],
        "OPTIONS": {},
    }
    del connections["default"]
    try:
        yield
    finally:
        connections["default"].close()
        connections["default"] = handle
        connections.settings["default"] = entry


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process of many into the block at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_folder() -> Path:
    """Make a folder that an unprivileged server may use: short, for its socket's sake."""
    folder = Path(tempfile.mkdtemp(prefix="relay-pg-"))
    folder.chmod(0o755)
    return folder


class Run:
    """The folder of one run of the tests, and the pipe whose end tells the server to go.

    The process that pytest was started as holds the pipe. However it ends, the kernel closes it.
    """

    def __init__(self) -> None:
        self.folder = make_folder()
        os.mkfifo(self.folder / "pipe")
        # Opened for both, since opening a pipe that nobody reads would wait.
        self._pipe = os.open(self.folder / "pipe", os.O_RDWR)
        os.environ[RUN_VARIABLE] = str(self.folder)

    def close(self) -> None:
        """Let the server go, and wait until it has."""
        kept = (self.folder / "kept").exists()
        os.close(self._pipe)
        deadline = time.monotonic() + START_SECONDS
        while kept and self.folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self.folder, ignore_errors=True)


def shared() -> Server:
    """Return the server of this run with a migrated template; start it if nobody has yet."""
    folder = Path(os.environ[RUN_VARIABLE])
    server = Server(folder / "server")
    with locked(folder / "lock"):
        if not (folder / "ready").exists():
            command = [sys.executable, "-m", "tests.postgresql_keeper", str(folder)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert not done.returncode, f"{done.stdout}\n{done.stderr}"
            server.migrate()
            (folder / "ready").touch()
    return server
