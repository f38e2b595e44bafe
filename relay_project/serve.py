"""Serve the reference project on loopback: web server and worker together, until told to stop.

Run as ``python -m relay_project.serve``. It brings the database and the static files up to date,
gives the user ``admin`` a new password, starts gunicorn and ``manage.py runworker``, and prints
where to log in. Ctrl-C or TERM stops both politely; the same again tells them to hurry. Exits 0
after such a stop, 1 when one of the two ended by itself or had to be killed.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
PORTS = range(8000, 8100)
ADMIN_NAME = "admin"

# A worker may finish what it holds; past the second limit the rest is killed.
FINISH_SECONDS = 5.0
STOP_SECONDS = 20.0
START_SECONDS = 60.0
POLL_SECONDS = 0.2

LAST_WORDS = 20
"""Lines of the worker's log that are shown when it ends by itself."""


def main() -> int:
    """Prepare, run both programs, and return the exit status."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "relay_project.settings")
    services = Services()
    # Before anything is started, so that no stop can come too early to be seen.
    signal.signal(signal.SIGINT, services.on_signal)
    signal.signal(signal.SIGTERM, services.on_signal)
    password = prepare()
    log = worker_log()
    with listen() as listener:
        port = listener.getsockname()[1]
        services.start(listener, log)
    try:
        if services.wait_until_answering(f"http://{HOST}:{port}/admin/login/"):
            announce(port, password, log)
        asked = services.wait()
    finally:
        clean = services.stop()
    return 0 if asked and clean else 1


def prepare() -> str:
    """Migrate, collect static files, and return the administrator's new password.

    A database without any job gets a few dozen, which the worker will run, and more for an hour.
    """
    import django
    from django.core.management import call_command

    django.setup()
    from relay_project import demo_data

    print("Preparing the database and the static files", flush=True)
    call_command("migrate", verbosity=0, interactive=False)
    call_command("collectstatic", verbosity=0, interactive=False)
    if enqueued := demo_data.fill():
        demo_data.open_doors()
        print(f"The database is new: {enqueued} jobs were enqueued to look at", flush=True)
    return reset_administrator()


def reset_administrator() -> str:
    """Give the administrator a new password and return it. Only its hash is kept.

    Somebody else of that name, who is no superuser, is not made one: that ends the program.
    """
    from django.contrib.auth import get_user_model

    password = secrets.token_urlsafe(12)
    users = get_user_model().objects
    user = users.filter(username=ADMIN_NAME).first()
    if user is None:
        users.create_superuser(ADMIN_NAME, password=password)
        return password
    if not (user.is_active and user.is_staff and user.is_superuser):
        raise SystemExit(
            f"The user {ADMIN_NAME!r} exists and is no superuser. Nobody is made one here: rename "
            "that user, or name another directory in RELAY_VAR."
        )
    user.set_password(password)
    user.save()
    return password


def listen() -> socket.socket:
    """Return a socket that listens on the first free port of ``PORTS``.

    Gunicorn inherits it, so nobody can take the port between the search and the start.
    """
    for port in PORTS:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            listener.close()
            continue
        listener.listen(128)
        return listener
    raise SystemExit(f"No free port on {HOST} from {PORTS[0]} to {PORTS[-1]}. Free one and retry.")


def worker_log() -> Path:
    """Return the file that the worker logs to."""
    from relay_project.settings import VAR_DIR

    return VAR_DIR / "worker.log"


def announce(port: int, password: str, log: Path) -> None:
    """Print where to go and how to get in."""
    lines = (
        "",
        "Relay is running.",
        f"  Address   http://{HOST}:{port}/admin/",
        f"  User      {ADMIN_NAME}",
        f"  Password  {password}   (new at each start)",
        f"  Worker    logs to {log.relative_to(ROOT) if log.is_relative_to(ROOT) else log}",
        "",
        "Press Ctrl-C to stop.",
    )
    print("\n".join(lines), flush=True)


class Services:
    """The web server and the worker, each the leader of its own process group.

    A group of its own keeps the terminal's Ctrl-C away from them: it would reach every process of
    theirs as well, and they would count our request to stop as the second one.
    """

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop_asked = threading.Event()
        self._signals = 0

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Note that somebody asked to stop."""
        self._signals += 1
        self._stop_asked.set()

    def start(self, listener: socket.socket, log: Path) -> None:
        """Start both programs; the web server takes over ``listener``, the worker writes ``log``.

        In the terminal the worker's lines would push the address and the password out of sight.
        """
        if self._stop_asked.is_set():
            return
        descriptor = listener.fileno()
        web = ["gunicorn", "relay_project.wsgi", "--bind", f"fd://{descriptor}"]
        web += ["--worker-class", "gthread", "--threads", "8", "--log-level", "warning"]
        self._start("web server", ["-m", *web], pass_fds=[descriptor])
        worker = ["manage.py", "runworker", "--shutdown-timeout", f"{FINISH_SECONDS:g}"]
        with log.open("ab") as lines:
            self._start("worker", worker, stdout=lines, stderr=lines)
        self._worker_log = log

    def _start(self, name: str, arguments: list[str], **options: Any) -> None:
        self._processes[name] = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def wait_until_answering(self, url: str) -> bool:
        """Wait for the first answer; false if somebody asked to stop or a program ended first."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._stop_asked.is_set() and not self._ended():
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return True
            except (urllib.error.URLError, TimeoutError):
                self._stop_asked.wait(POLL_SECONDS)
        return False

    def wait(self) -> bool:
        """Wait for a request to stop (true) or for a program that ends by itself (false)."""
        while not self._stop_asked.wait(POLL_SECONDS):
            if ended := self._ended():
                name, status = ended
                print(f"The {name} ended by itself with status {status}. Stopping.", flush=True)
                if name == "worker":
                    self._show_last_words()
                return False
        return True

    def _show_last_words(self) -> None:
        lines = self._worker_log.read_text(errors="replace").splitlines()
        print(f"The end of {self._worker_log}:", *lines[-LAST_WORDS:], sep="\n  ", flush=True)

    def _ended(self) -> tuple[str, int] | None:
        for name, process in self._processes.items():
            if (status := process.poll()) is not None:
                return name, status
        return None

    def stop(self) -> bool:
        """Ask both to stop, wait, and kill what is left. Returns whether nothing had to be."""
        if self._groups_alive():
            print(f"Stopping. Running jobs have {FINISH_SECONDS:g} s to finish.", flush=True)
        self._ask_to_stop()
        passed_on = self._signals
        deadline = time.monotonic() + STOP_SECONDS
        while self._groups_alive() and time.monotonic() < deadline:
            if self._signals > passed_on:
                passed_on = self._signals
                self._ask_to_stop()
            time.sleep(POLL_SECONDS / 4)  # a process group has no descriptor to wait on
        left = self._groups_alive()
        for name in left:
            print(f"The {name} did not stop within {STOP_SECONDS:g} s: killed.", flush=True)
            os.killpg(self._processes[name].pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        return not left

    def _ask_to_stop(self) -> None:
        for process in self._processes.values():
            process.terminate()

    def _groups_alive(self) -> list[str]:
        """Name the programs of which some process is still there, not only the first one."""
        return [name for name, process in self._processes.items() if _group_alive(process)]


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
