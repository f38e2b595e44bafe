"""What jobs do in the tests of processes: leave a trace in a file, wait, fail, or harm their process.

Every chore gets the path of the side-effect file first, and appends one line for each run.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

from django.contrib.auth.models import Group

from relay_queue.backoff import Backoff
from relay_queue.context import RelayContext
from relay_queue.task import task

WAIT_SECONDS = 60.0
"""How long a chore waits for its file, lest a failed test leaves it there for ever."""

AT_ONCE = Backoff(base_seconds=0.01, max_seconds=0.01)


def leave(effects: str, context: RelayContext, word: str) -> None:
    """Append ``job epoch attempt pid word``, in one write: lines of several processes never mix."""
    line = f"{context.job_id} {context.epoch} {context.attempt} {os.getpid()} {word}\n"
    descriptor = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def wait_for(path: str, seconds: float = WAIT_SECONDS) -> None:
    """Return once the file exists."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {path}")
        time.sleep(0.01)


@task(takes_context=True)
def note(context: RelayContext, effects: str) -> None:
    leave(effects, context, "ran")


@task(takes_context=True, backoff=AT_ONCE)
def note_slowly(context: RelayContext, effects: str, seconds: float) -> None:
    leave(effects, context, "ran")
    time.sleep(seconds)


@task(takes_context=True)
def nothing(context: RelayContext) -> None:
    pass


@task(takes_context=True)
def give_back(context: RelayContext, effects: str, text: str) -> str:
    """Return a text, and so have it written once more."""
    leave(effects, context, "ran")
    return text


@task(takes_context=True, backoff=AT_ONCE)
def wait(context: RelayContext, effects: str, until: str) -> str:
    """Run until a file exists, deaf to any wish that it should stop."""
    leave(effects, context, "began")
    wait_for(until)
    leave(effects, context, "ended")
    return "waited"


@task(takes_context=True, backoff=AT_ONCE)
def wait_first_time(context: RelayContext, effects: str, until: str) -> str:
    """Wait in the first attempt only."""
    leave(effects, context, "began")
    if context.attempt == 1:
        wait_for(until)
    leave(effects, context, "ended")
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=AT_ONCE)
async def wait_asynchronously(context: RelayContext, effects: str, until: str) -> str:
    leave(effects, context, "began")
    try:
        while context.attempt == 1 and not os.path.exists(until):
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        leave(effects, context, "cancelled")
        raise
    leave(effects, context, "ended")
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=AT_ONCE)
def wait_politely(context: RelayContext, effects: str, until: str) -> str:
    """Wait for a file, or until told to stop; then go on to the end all the same."""
    leave(effects, context, "began")
    while not context.cancelled and not os.path.exists(until):
        time.sleep(0.01)
    leave(effects, context, "told" if context.cancelled else "ended")
    return "late"


@task(takes_context=True, backoff=AT_ONCE)
def heed(context: RelayContext, effects: str) -> None:
    """Run until told to stop, and obey."""
    leave(effects, context, "began")
    while True:
        context.raise_if_cancelled()
        time.sleep(0.01)


@task(takes_context=True, backoff=AT_ONCE)
def fail_times(context: RelayContext, effects: str, times: int) -> str:
    leave(effects, context, "ran")
    if context.attempt <= times:
        raise ValueError(f"attempt {context.attempt}")
    return f"attempt {context.attempt}"


@task(takes_context=True, backoff=Backoff(base_seconds=1.0, max_seconds=300.0))
def fail_for_a_second(context: RelayContext, effects: str) -> None:
    """Fail once, then wait for the default back-off of a second."""
    leave(effects, context, "ran")
    if context.attempt == 1:
        raise ValueError("the first attempt")


@task(takes_context=True, backoff=Backoff(base_seconds=3.0, max_seconds=3.0))
def fail_for_seconds(context: RelayContext, effects: str) -> None:
    """Fail once, then wait for so long that a test can act meanwhile, whatever the load."""
    leave(effects, context, "ran")
    if context.attempt == 1:
        raise ValueError("the first attempt")


@task(takes_context=True, atomic=True, timeout_seconds=2, backoff=AT_ONCE)
def write_together(context: RelayContext, effects: str, name: str, until: str) -> None:
    """Write a row in the transaction of the ack, and stay in it until a file exists."""
    Group.objects.create(name=name)
    leave(effects, context, "wrote")
    if context.attempt == 1:
        wait_for(until)


@task(takes_context=True, atomic=True, timeout_seconds=1, backoff=AT_ONCE)
def write_slowly(context: RelayContext, effects: str, seconds: float) -> None:
    """Write a row in the transaction of the ack, and keep the writer for a while."""
    leave(effects, context, "began")
    Group.objects.create(name=f"job {context.job_id}")
    time.sleep(seconds)


@task(takes_context=True, backoff=AT_ONCE)
def begin_by_hand_and_wait(context: RelayContext, effects: str, until: str) -> None:
    """Take the writer as any function may, and keep it."""
    from django.db import transaction

    leave(effects, context, "began")
    if context.attempt == 1:
        with transaction.atomic():
            Group.objects.create(name="kept")
            leave(effects, context, "holds")
            wait_for(until)


@task(takes_context=True, backoff=AT_ONCE)
def poison(context: RelayContext, effects: str, kind: str) -> None:
    """Harm the process that runs this."""
    leave(effects, context, "ran")
    POISONS[kind]()


# --- Poison ---------------------------------------------------------------------------


def _exit() -> None:
    os._exit(3)


def _abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _close_everything() -> None:
    os.closerange(3, 1024)


def _deafen() -> None:
    """Put C's own handler in place of Python's: only the main thread may do that politely."""
    ctypes.CDLL(None).signal(signal.SIGTERM, 0)
    ctypes.CDLL(None).signal(signal.SIGINT, 0)


def _move_away() -> None:
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)


def _leave_program() -> None:
    """Start a program that outlives this function, and the worker if need be."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_SECONDS})"])


def _leave_fork() -> None:
    """Fork a child that outlives this function and keeps whatever it has inherited."""
    if not os.fork():
        time.sleep(LONG_SECONDS)
        os._exit(0)


def _return_in_child() -> None:
    """Fork, and return in both processes."""
    os.fork()


def _raise_in_child() -> None:
    if not os.fork():
        raise ValueError("in the child")


LONG_SECONDS = 3.0
"""How long what poison leaves behind goes on: longer than recovery takes."""

POISONS = {
    "exit": _exit,
    "abort": _abort,
    "kill": _kill_itself,
    "close": _close_everything,
    "deafen": _deafen,
    "chdir": _move_away,
    "program": _leave_program,
    "fork": _leave_fork,
    "return in child": _return_in_child,
    "raise in child": _raise_in_child,
}


@task(takes_context=True, backoff=AT_ONCE)
def hog(context: RelayContext, effects: str, seconds: float, until: str) -> None:
    """Keep the interpreter to itself: no other Python thread of the process gets to run."""
    leave(effects, context, "began")
    if context.attempt == 1:
        # PyDLL does not let go of the interpreter while C runs.
        ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
        wait_for(until)
    leave(effects, context, "ended")


@task(takes_context=True, backoff=AT_ONCE)
def hog_until_opened(context: RelayContext, effects: str, start: str, pipe: str) -> None:
    """Once a file exists, keep the interpreter until somebody opens a named pipe for writing."""
    leave(effects, context, "began")
    wait_for(start)
    leave(effects, context, "hogs")
    os.close(ctypes.PyDLL(None).open(pipe.encode(), os.O_RDONLY))
    leave(effects, context, "ended")


@task(takes_context=True)
def leave_child_and_die(context: RelayContext, effects: str, path: str) -> None:
    """Fork a child that lives until a file exists, then kill the worker."""
    leave(effects, context, "ran")
    if context.attempt > 1:
        return
    if not os.fork():
        wait_for(path)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@task(takes_context=True)
def complain(context: RelayContext, effects: str, lines: int) -> None:
    """Write so many lines to the log of the project."""
    leave(effects, context, "began")
    for number in range(lines):
        logging.getLogger("shop").warning("line %d of job %d", number, context.job_id)
    leave(effects, context, "ended")


@task(takes_context=True)
def leave_thread(context: RelayContext, effects: str, until: str) -> None:
    """Leave a thread behind that ends when a file exists, and then leaves a line."""

    def go_on() -> None:
        wait_for(until)
        leave(effects, context, "ended")

    leave(effects, context, "began")
    threading.Thread(target=go_on, daemon=False).start()
