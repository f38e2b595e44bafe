"""Workers behind PgBouncer in transaction mode, whose sessions serve other clients, too."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from tests.conftest import wait_until
from tests.postgresql import make_folder
from tests.process import chores, pooled
from tests.process.farm import Farm, on_postgresql
from tests.worker.test_session import settings_of

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = [
    on_postgresql,
    pytest.mark.skipif(
        PROGRAM is None, reason="no pgbouncer: nothing is tested behind a real pooler"
    ),
]

CONFIGURATION = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr =
unix_socket_dir = {folder}
listen_port = 6432
auth_type = any
pool_mode = transaction
default_pool_size = {sessions}
ignore_startup_parameters = extra_float_digits
"""


class Pooler:
    """A PgBouncer in front of the farm's server, with a few sessions for all its clients."""

    def __init__(self, farm: Farm, folder: Path, sessions: int) -> None:
        named = conninfo_to_dict(str(farm.database))
        self.sessions = sessions
        self.url = f"postgresql://{named['user']}@/{named['dbname']}?host={folder}&port=6432"
        configuration = folder / "pgbouncer.ini"
        configuration.write_text(
            CONFIGURATION.format(
                **{name: named[name] for name in ("host", "port", "user")},
                folder=folder,
                sessions=sessions,
            )
        )
        account: dict[str, Any] = {}
        if os.geteuid() == 0:  # which it refuses
            folder.chmod(0o777)
            account = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        assert PROGRAM is not None
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, str(configuration)], stdout=log, stderr=log, **account
            )
        wait_until(self._answers, message=lambda: (folder / "log").read_text())

    def settings(self) -> list[list[str]]:
        """Return what each of the sessions has set, as other clients find it."""
        clients = [psycopg.connect(self.url, prepare_threshold=None) for _ in range(self.sessions)]
        try:  # each keeps its session until its transaction ends
            return [settings_of(client.execute) for client in clients]
        finally:
            for client in clients:
                client.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True


@pytest.fixture
def pooler(farm: Farm, wakeup: str) -> Iterator[Pooler]:
    folder = make_folder()
    # The worker's own session keeps none of them, since it is idle between transactions.
    pooler = Pooler(farm, folder, sessions=1 if wakeup == "poll" else 2)
    yield pooler
    pooler.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("wakeup", ["poll", "auto"])
def test_other_clients_of_the_pool_find_the_settings_of_their_sessions_as_they_were(
    farm: Farm, pooler: Pooler, wakeup: str, tmp_path: Path
) -> None:
    before = pooler.settings()
    behind = Farm(pooler.url, tmp_path / "behind")
    behind.relay |= {"WAKEUP": wakeup, "POLL_SECONDS": 0.2}
    behind.variables["DJANGO_SETTINGS_MODULE"] = pooled.__name__
    try:
        workers = behind.work()
        for job in [farm.enqueue(chores.note) for _ in range(20)]:
            farm.wait_state(job, "succeeded")
        assert pooler.settings() == before
        with psycopg.connect(str(farm.database), autocommit=True) as server:
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                "current_database() AND backend_type = 'client backend' AND pid <> "
                "pg_backend_pid()"
            )
        connections["default"].close()
        farm.wait_state(farm.enqueue(chores.note), "succeeded")
        assert workers.poll() is None, behind.log(workers)
        assert pooler.settings() == before, "nor is anything set by a connection that came back"
    finally:
        behind.close()
