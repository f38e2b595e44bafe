"""Processes that work for a command, and what can be seen of any process from outside.

A process that works for a command ends with it, whatever ends the command: the command keeps its
standard input open, and the end of that is its order to leave. Nothing here needs Django.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

T = TypeVar("T")

STOP_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.02
STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that tell a command to stop."""

_KIB_PER_MIB = 1024


class LabError(Exception):
    """The lab could not see or measure what it was to. The message says what, and why."""


def wait_for(
    what: str,
    look: Callable[[], T | None],
    *,
    seconds: float,
    pause: float = LOOK_SECONDS,
    heed: Callable[[], None] = lambda: None,
) -> T:
    """Look every ``pause`` seconds until there is something, and return it.

    ``heed`` is called before each pause, and may raise to end the wait. Raises `LabError`, naming
    ``what``, after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        heed()
        if time.monotonic() > deadline:
            raise LabError(f"{what} did not happen within {seconds:.3g} s")
        time.sleep(pause)  # other processes make it happen, and report it to nobody
    return found


# -- the folder of a command


def make_folder(prefix: str) -> Path:
    """Make an empty folder on a file system where locks and sockets work, and return it.

    Tries the usual temporary directory first. Raises ``OSError`` if none is usable.
    """
    problem: OSError | None = None
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):
        try:
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            problem = problem or error
            continue
        try:
            _try_out(directory)
        except OSError as error:
            problem = problem or error
            shutil.rmtree(directory, ignore_errors=True)
            continue
        return directory
    raise OSError(f"No temporary directory has locks and sockets: {problem}. Set TMPDIR.")


def _try_out(directory: Path) -> None:
    """Do what workers do beside a database. Raises ``OSError`` where that is impossible."""
    lock, bell = directory / "lock", directory / "bell"
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        # Socket paths are short; the doorbell has its own ways with long ones.
        if len(os.fsencode(bell)) <= 100:
            made.bind(str(bell))
            bell.unlink()
    lock.unlink()


# -- the side of the command


@contextmanager
def started(
    arguments: Sequence[str],
    directory: Path,
    variables: Mapping[str, str],
    stdout: int | None = subprocess.PIPE,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``python -m relay_queue.lab`` in a directory, with variables of the environment.

    At the end of the block nothing is left of the process or its children.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "relay_queue.lab", *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        cwd=directory,
        # A group of its own: Ctrl-C reaches the command alone, and what is left can be ended.
        start_new_session=True,
    )
    try:
        with process:
            try:
                yield process
            finally:
                _end(process)
    finally:
        # As a rule the group is empty: the process has stopped all that it started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to leave, and wait for it; by force if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def leaving_when_told(*numbers: signal.Signals) -> Iterator[None]:
    """Turn the first of these signals into an exception, so that everything is cleaned up.

    Further ones are ignored: they must not stop the stopping. So is one that was ignored before, as
    under ``nohup``. Only the main thread may set it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def leave(number: int, _frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = [signal.signal(number, leave) for number in heeded]
    try:
        yield
    finally:
        for number, handler in zip(heeded, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put off signals that would raise an exception in this block; they arrive at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    # Python runs handlers in the main thread whatever its mask, so the handlers are exchanged.
    before = {
        number: handler for number in STOPPING if callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, lambda number, _frame: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for missed in heard:
            signal.raise_signal(missed)


# -- the side of the process that was started


def leave_with_parent() -> None:
    """Leave by ``SystemExit`` when told to, and when the command that started this one is gone."""
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the stopping
    # An exception, so that every block on the way out stops what it has started.
    raise SystemExit(1)


def _watch_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


# -- looking at a process from outside; what a system does not say is None


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended; one that waits to be reaped has."""
    stat = _read(pid, "stat")
    if stat is not None:
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def threads(pid: int) -> int | None:
    """Return how many threads a process has."""
    return _number(pid, "status", "Threads:")


def resident_mib(pid: int) -> float | None:
    """Return the resident memory of a process, shared pages included, in MiB."""
    kib = _number(pid, "status", "VmRSS:")
    return None if kib is None else kib / _KIB_PER_MIB


def proportional_mib(pid: int) -> float | None:
    """Return the memory of a process in MiB, each shared page divided by the number of its users."""
    kib = _number(pid, "smaps_rollup", "Pss:")
    return None if kib is None else kib / _KIB_PER_MIB


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time that the living threads of a process have used."""
    used = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # Nanoseconds; the counters in /proc/PID/stat have steps of 10 ms.
            used += int((_read(pid, f"task/{thread.name}/schedstat") or "0").split()[0])
    except FileNotFoundError:
        return None
    return used / 1e9


def _number(pid: int, name: str, key: str) -> int | None:
    for line in (_read(pid, name) or "").splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return None


def _read(pid: int, name: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
