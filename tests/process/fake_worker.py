"""A supervisor over workers that only pretend: ``python -m tests.process.fake_worker``.

Arguments: a JSON object with ``log`` (a file that gets one line per event), ``child`` (the name
of a function below) and optionally ``processes``, ``drain``, ``max_jobs``, ``shutdown_timeout``,
``ready_timeout``, ``gate`` (a database path to watch), ``gate_hold``, ``adopts`` (become the
parent of orphans, as process 1 does), ``nohup``, and ``no_room`` (forking fails). The option
``--parent-fd`` may follow, as for the real command.
"""

import ctypes
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from relay_queue.db.gate import gate_for
from relay_queue.worker import supervisor
from relay_queue.worker.options import ANSWERED, READY, WAITS, WorkerOptions
from relay_queue.worker.processes import Child
from relay_queue.worker.supervisor import Supervisor
from relay_queue.worker.watchdog import GateWatch

PR_SET_CHILD_SUBREAPER = 36

Say = Callable[[str], None]


def say_to(log: str, text: str) -> None:
    """Append one line, in one write, so that lines of several processes never mix."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{os.getpid()} {text}\n".encode())
    os.close(descriptor)


def next_order(control: int) -> bytes:
    """Wait for one order; empty once the supervisor is gone."""
    try:
        return os.read(control, 1)
    except ConnectionResetError:  # it died before it had read READY
        return b""


def obey(say: Say, options: WorkerOptions, control: int) -> int:
    """Get ready, report every order, and end on the orders that say so."""
    os.write(control, READY)
    say(f"ready {options.name}")
    while True:
        order = next_order(control)
        say(f"order {order.decode() or 'eof'}")
        if order in {b"d", b"q", b""}:
            return 0


def ignore(say: Say, options: WorkerOptions, control: int) -> int:
    """Get ready and report orders, but only ``QUIT`` ends it."""
    os.write(control, READY)
    say(f"ready {options.name}")
    while (order := os.read(control, 1)) != b"q":
        say(f"order {order.decode()}")
    say("order q")
    return 0


def deaf(say: Say, options: WorkerOptions, control: int) -> int:
    """Get ready and never read an order."""
    os.write(control, READY)
    say(f"ready {options.name}")
    while True:
        time.sleep(60)


def hang(say: Say, options: WorkerOptions, control: int) -> int:
    """Never get ready."""
    say("hang")
    while True:
        time.sleep(60)


def wait_for_database(say: Say, options: WorkerOptions, control: int) -> int:
    """Get ready once the database answers, which is when a file exists."""
    os.write(control, WAITS)
    say("waits")
    while not os.path.exists(json.loads(sys.argv[1])["log"] + ".database"):
        time.sleep(0.01)
    os.write(control, ANSWERED)
    return obey(say, options, control)


def hang_beside_database(say: Say, options: WorkerOptions, control: int) -> int:
    """Hear from the database at once, and never get ready."""
    os.write(control, WAITS + ANSWERED)
    return hang(say, options, control)


def crash(say: Say, options: WorkerOptions, control: int) -> int:
    """Fail to start."""
    say("crash")
    raise RuntimeError("this worker cannot start")


def first_crashes(say: Say, options: WorkerOptions, control: int) -> int:
    """Fail to start in the first seat, obey in the others."""
    return (crash if options.name.endswith("-1") else obey)(say, options, control)


def work_once(say: Say, options: WorkerOptions, control: int) -> int:
    """Do what there is to do and leave."""
    os.write(control, READY)
    say(f"worked {random.random()}")
    print(f"worked in {options.name}")
    return 0


def crash_once(say: Say, options: WorkerOptions, control: int) -> int:
    """Die of SIGKILL the first time, then do the work. The log tells which time it is."""
    os.write(control, READY)
    with open(json.loads(sys.argv[1])["log"]) as log:
        again = "worked" in log.read()
    say("worked")
    if not again:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hold_gate(say: Say, options: WorkerOptions, control: int) -> int:
    """Take the writer gate and keep it."""
    os.write(control, READY)
    with gate_for(json.loads(sys.argv[1])["gate"]).acquire(0):
        say("holds")
        time.sleep(60)
    return 0


def inspect_itself(say: Say, options: WorkerOptions, control: int) -> int:
    """Report what is open and how signals are handled, then obey."""
    others = [number for number in range(3, 64) if is_open(number) and number != control]
    handled = all(callable(signal.getsignal(number)) for number in STOPS)
    say(f"open {others} handled {handled}")
    return obey(say, options, control)


def leave_orphan(say: Say, options: WorkerOptions, control: int) -> int:
    """Leave a child behind that ends a moment later, under the supervisor as its new parent."""
    os.write(control, READY)
    parent = os.getpid()
    if not os.fork():
        while os.getppid() == parent:
            time.sleep(0.01)
        say(f"orphan of {os.getppid()}")
        os._exit(0)
    return 0


def refuse(*arguments: object) -> Child:
    """Fail to fork, as on a system that has no room for another process."""
    raise BlockingIOError("no room for another process")


def is_open(descriptor: int) -> bool:
    """Say whether a descriptor is in use."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Read the arguments and supervise."""
    given = json.loads(sys.argv[1])
    logging.basicConfig(level="DEBUG", format="%(levelname)s %(message)s")
    options = WorkerOptions(
        name="fake",
        queues=None,
        exclude_queues=(),
        backend=None,
        concurrency=1,
        lease_seconds=None,
        shutdown_timeout_seconds=given.get("shutdown_timeout", 30),
        drain=given.get("drain", False),
        max_jobs=given.get("max_jobs"),
    )
    if given.get("adopts"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if given.get("nohup"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if given.get("no_room"):
        supervisor.fork_child = refuse
    watch = None
    if "gate" in given:
        watch = GateWatch(gate_for(given["gate"]), given["gate_hold"])
    say = partial(say_to, given["log"])
    say("supervisor")
    return Supervisor(
        options,
        given.get("processes", 1),
        partial(globals()[given["child"]], say),
        ready_timeout_seconds=given.get("ready_timeout", 30),
        gate_watch=watch,
        parent=socket.socket(fileno=int(sys.argv[3])) if len(sys.argv) > 3 else None,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
