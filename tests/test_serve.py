"""``make serve``: one command that starts everything, and one signal that ends everything."""

import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes_with, wait_until
from tests.people import STRANGER, only_root

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]

# The last line of the announcement: the worker prints hints of its own before it.
READY = "Press Ctrl-C to stop."


class Server:
    """``python -m relay_project.serve`` with a directory of its own for what it writes."""

    def __init__(self, directory: Path) -> None:
        self.mark = f"RELAY_VAR={directory / 'var'}"
        self.log = directory / "serve.log"
        environment = {
            **os.environ,
            "RELAY_VAR": str(directory / "var"),
            "DJANGO_SETTINGS_MODULE": "relay_project.settings",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relay_project.serve"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: READY in self.output or self.process.poll() is not None,
            timeout=120,
            message=lambda: self.output,
        )
        assert READY in self.output, self.output

    def fact(self, label: str) -> str:
        found = re.search(rf"{label} +(\S+)", self.output)
        assert found, self.output
        return found[1]

    def pids(self) -> dict[int, str]:
        return processes_with(self.mark)

    def pid_of(self, words: str) -> int:
        """Return the oldest process whose command line holds ``words``."""
        return min((pid for pid, line in self.pids().items() if words in line), key=began)

    def close(self) -> None:
        """Kill what is left of it."""
        for pid in [*self.pids(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def began(pid: int) -> int:
    """Return when a process began, in ticks of the system; numbers of processes start over."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server for the tests that do not end it; TERM ends it after them."""
    lasting = Server(tmp_path_factory.mktemp("lasting"))
    yield lasting
    try:
        lasting.process.terminate()
        assert lasting.process.wait(60) == 0, lasting.output
        assert lasting.pids() == {}
    finally:
        lasting.close()


def test_printed_password_opens_the_admin(lasting: Server) -> None:
    lasting.wait_until_ready()
    address = lasting.fact("Address")
    cookies = CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    browser.open(f"{address}login/").read()
    token = next(str(cookie.value) for cookie in cookies if cookie.name == "csrftoken")
    form = {
        "username": lasting.fact("User"),
        "password": lasting.fact("Password"),
        "csrfmiddlewaretoken": token,
        "next": "/admin/",
    }
    page = browser.open(f"{address}login/", urllib.parse.urlencode(form).encode()).read().decode()
    assert "Site administration" in page
    style = browser.open(urllib.parse.urljoin(address, "/static/admin/css/base.css"))
    assert style.status == 200


def test_taken_port_leads_to_the_next_one_and_ctrl_c_ends_everything_with_status_0(
    lasting: Server, server: Server
) -> None:
    lasting.wait_until_ready()
    server.wait_until_ready()
    assert server.fact("Address") != lasting.fact("Address")
    # Each start has its own password.
    assert server.fact("Password") != lasting.fact("Password")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0, server.output
    assert server.pids() == {}


@pytest.mark.parametrize("words", ["runworker", "gunicorn"])
def test_end_of_one_program_ends_the_other_with_status_1(server: Server, words: str) -> None:
    server.wait_until_ready()
    os.kill(server.pid_of(words), signal.SIGKILL)
    assert server.process.wait(60) == 1, server.output
    assert server.pids() == {}


def run_in(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run ``source`` as the reference project that writes to ``directory``, with an open umask."""
    environment = {
        **os.environ,
        "RELAY_VAR": str(directory),
        "DJANGO_SETTINGS_MODULE": "relay_project.settings",
    }
    environment.pop("RELAY_SECRET_KEY", None)
    command = [sys.executable, "-c", f"import os; os.umask(0)\n{source}"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


READ_KEY = "from django.conf import settings; print(settings.SECRET_KEY)"

PREPARE = "from relay_project.serve import prepare; prepare()"


def test_everything_the_project_writes_is_its_users_alone(tmp_path: Path) -> None:
    done = run_in(tmp_path / "var", PREPARE)
    assert done.returncode == 0, done.stderr
    written = [tmp_path / "var", *(tmp_path / "var").rglob("*")]
    assert {"relay.sqlite3", "secret_key", "static"} <= {path.name for path in written}
    assert [path for path in written if path.lstat().st_mode & 0o077] == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_secret_key_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "secret_key").write_text("chosen by another")
    (tmp_path / "secret_key").chmod(mode)
    done = run_in(tmp_path, READ_KEY)
    assert done.returncode == 1
    assert f"may be written by others (mode {mode:o})" in done.stderr
    assert "RELAY_SECRET_KEY" in done.stderr


@only_root
def test_a_secret_key_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret_key").write_text("chosen by another")
    os.chown(tmp_path / "secret_key", STRANGER, STRANGER)
    done = run_in(tmp_path, READ_KEY)
    assert done.returncode == 1
    assert f"belongs to user {STRANGER}" in done.stderr


def test_a_secret_key_is_made_once_and_kept(tmp_path: Path) -> None:
    first, second = run_in(tmp_path, READ_KEY), run_in(tmp_path, READ_KEY)
    assert first.stdout == second.stdout
    assert len(first.stdout.strip()) >= 50


def test_an_existing_user_is_not_made_a_superuser(tmp_path: Path) -> None:
    make = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "from django.contrib.auth.models import User\n"
        "call_command('migrate', verbosity=0)\n"
        "User.objects.create_user('admin', password='own')\n"
    )
    look = (
        "import django; django.setup()\n"
        "from django.contrib.auth.models import User\n"
        "user = User.objects.get()\n"
        "print(user.is_superuser, user.is_staff, user.check_password('own'))\n"
    )
    assert run_in(tmp_path, make).returncode == 0
    done = run_in(tmp_path, PREPARE)
    assert done.returncode == 1
    assert "no superuser" in done.stderr
    assert run_in(tmp_path, look).stdout.split() == ["False", "False", "True"]
