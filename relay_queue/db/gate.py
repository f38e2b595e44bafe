"""The writer gate: one writer of a SQLite database at a time, each in its turn.

SQLite lets one connection write and makes the others guess when to try again. A connection that
guesses badly starves. The gate is an exclusive ``flock`` on a file beside the database, taken
before a write transaction begins and let go after it ended. It gives fairness only: no argument
about safety may rest on it.

Order is always gate first, SQLite second. Never ask for the gate while a connection of this
thread is already in a transaction that does not hold it.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from math import inf
from time import monotonic, time
from types import TracebackType
from typing import Any, cast

from relay_queue.db.filename import file_of
from relay_queue.db.gatefile import SUPPORTED, GateFile, Holder
from relay_queue.db.replaced import has_foreign_log, put_log_aside

__all__ = ["Gate", "GateTimeout", "Holder", "Permit", "gate_for", "gate_of"]

# How often a waiter looks for itself whether something was missed (a permit lost in a crash
# of its thread, an interrupted hand-over). Normal hand-overs wake the waiter at once.
RECHECK_SECONDS = 0.25

# A process that is stopped while it is next keeps that place, and the waiters behind it cannot use
# a free gate. So a request that is not met for PATIENCE_SECONDS is overdue. Its waiters then try
# the gate themselves, past the process that is next. They pause between two tries, so that none of
# them takes the gate again before the others have had a chance.
PATIENCE_SECONDS = 0.5
OVERDUE_RECHECK_SECONDS = 0.05

# For how long a gate that could not be used is left alone. The cause may pass, as when the
# process had no descriptor to spare.
DISABLED_SECONDS = 5.0


class GateTimeout(Exception):
    """The gate was not free in time.

    ``path`` is the gate file, ``waited_seconds`` how long the caller waited, ``holder`` who
    held it at the end (None if that is not known).
    """

    def __init__(self, path: str, waited_seconds: float, holder: Holder | None) -> None:
        super().__init__(path, waited_seconds, holder)
        self.path = path
        self.waited_seconds = waited_seconds
        self.holder = holder

    def __str__(self) -> str:
        holder = self.holder or "a process that left no name"
        return (
            f"waited {self.waited_seconds:.1f} s for the writer gate {self.path}, held by {holder}"
        )


class _Hold:
    """One stay behind the gate: the thread it belongs to and how many permits it has."""

    __slots__ = ("permits", "since", "since_epoch", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.permits = 1
        self.since = monotonic()
        self.since_epoch = time()


class Permit:
    """The right to write, as a context manager.

    ``gate`` is the gate that gave it, and ``waited_seconds`` says how long that took. A permit that
    is lost (its thread died, its connection was garbage collected) releases itself.
    """

    __slots__ = ("_hold", "gate", "waited_seconds")

    def __init__(self, gate: Gate) -> None:
        self.waited_seconds = 0.0
        self.gate = gate
        self._hold: _Hold | None = None

    def release(self) -> None:
        """Give the permit back; the gate opens with the last one. May be repeated, any thread."""
        if self._hold is not None:
            self.gate._release(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._hold is not None:
            self.gate._release_lost(self._hold)


class _Waiter:
    """A thread that waits for its permit; ``granted`` is unlocked when it has come."""

    __slots__ = ("granted", "permit", "thread")

    def __init__(self, permit: Permit, thread: threading.Thread) -> None:
        self.permit = permit
        self.thread = thread
        self.granted = threading.Lock()
        self.granted.acquire()


class Gate:
    """The gate of one database file in this process.

    Inside the process it is idle, *asked for* (a helper thread blocks in ``flock``) or held. The
    helper's request belongs to no waiter. When it is met, the next waiter in line gets the gate; if
    all of them gave up, the gate is let go. So there is never a second request, which on the same
    descriptor would be granted at once and break the gate. A waiter may take a free gate although
    the helper asks for it; the helper then finds out whose it is.

    ``path`` is the gate file. ``enabled`` is False while it cannot be used: no ``flock``, or
    the file cannot be opened or locked; then every permit is granted at once. After some
    seconds it is tried again.
    """

    def __init__(self, database: str) -> None:
        self._file = GateFile(database)
        self.path = self._file.path
        self.enabled = SUPPORTED
        self._disabled_until = inf
        self._reset()

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._wanted = threading.Lock()
        self._wanted.acquire()
        self._hold: _Hold | None = None
        self._asked = False
        self._asked_at = 0.0
        self._helper: threading.Thread | None = None
        self._first: deque[_Waiter] = deque()
        self._rest: deque[_Waiter] = deque()
        self._served_first = False
        self._lost: deque[_Hold] = deque()

    def acquire(self, timeout_seconds: float | None, *, first: bool = False) -> Permit:
        """Wait for the gate and return the permit; raise ``GateTimeout`` when time is up.

        ``None`` waits for ever, ``0`` only tries. Time is never up at a free gate, unless it
        goes to an earlier waiter of this process. Inside the process waiters are served in
        order of arrival; ``first`` goes ahead of the others, but not twice in a row. The
        thread that holds the gate already gets a nested permit at once.
        """
        thread = threading.current_thread()
        permit = Permit(self)
        waiter: _Waiter | None = None
        try:
            with self._mutex:
                if self._take(permit, thread):
                    return permit
                waiter = _Waiter(permit, thread)
                (self._first if first else self._rest).append(waiter)
                if timeout_seconds is None or timeout_seconds > 0:
                    self._ask()
            self._wait(waiter, timeout_seconds)
        except BaseException:
            # Also after Ctrl-C: a hold that no permit refers to would keep the gate shut.
            self._give_up(permit, waiter)
            raise
        return permit

    def holder(self) -> Holder | None:
        """Who holds the gate, in any process; None if it is free, or the holder is not known."""
        hold = self._hold
        if hold is not None:
            return Holder(os.getpid(), hold.thread.name, hold.since_epoch)
        return self._file.read_holder() if SUPPORTED else None

    def held_by_this_thread(self) -> bool:
        """Whether the calling thread holds the gate."""
        hold = self._hold
        return hold is not None and hold.thread is threading.current_thread()

    def held_seconds(self) -> tuple[int, float] | None:
        """Thread id and time held, if this process holds the gate now. Never blocks."""
        hold = self._hold
        if hold is None:
            return None
        return hold.thread.ident or 0, monotonic() - hold.since

    def note_log(self, file_inode: int) -> bool:
        """Note whose log is beside the database, for the holder; whether there is one to note."""
        return self.enabled and self._file.write_log_owner(file_inode)

    def forget_log(self) -> None:
        """Forget whose log it was, if the last connection has taken the log away."""
        if self.enabled:
            self._file.forget_log_owner()

    def has_foreign_log(self) -> bool:
        """Whether the log beside the database is that of another file, which was replaced."""
        return SUPPORTED and has_foreign_log(self._file.database, self._file.read_log_owner())

    def part_from_foreign_log(self) -> None:
        """Put such a log aside, for the holder. Raises ``OSError``."""
        if self.has_foreign_log():
            put_log_aside(self._file.database)

    # Everything below runs under ``self._mutex``, unless it says otherwise.

    def _take(self, permit: Permit, thread: threading.Thread) -> bool:
        """Grant without waiting: nested, ungated, or free with an empty line."""
        if self._lost:
            self._release_all_lost()
        hold = self._hold
        if hold is not None:
            if hold.thread is not thread:
                return False
            hold.permits += 1
            permit._hold = hold
            return True
        if not self._open():
            permit._hold = _Hold(thread)
            return True
        if self._asked or self._rest or self._first:
            return False
        return self._try(permit, thread)

    def _try(self, permit: Permit, thread: threading.Thread, *, ahead: bool = False) -> bool:
        """Take the lock for ``permit`` if it is free now; ``ahead`` of the process that is next."""
        # The hold is noted before the lock is taken: an interrupt in between is then undone by
        # ``_give_up``, and unlocking what was not locked does no harm.
        hold = self._hold = permit._hold = _Hold(thread)
        try:
            locked = self._file.try_lock_ahead() if ahead else self._file.try_lock()
        except OSError as error:
            self._disable(error)
            return True
        if not locked:
            self._hold = permit._hold = None
            return False
        self._file.write_holder(thread.name, hold.since_epoch)
        return True

    def _ask(self) -> None:
        """Serve the next waiter now if possible, else let the helper do it."""
        if self._asked or self._hold is not None or self._next() is None or self._serve_next():
            return
        if self._helper is None:
            helper = threading.Thread(target=self._serve, name="writer-gate", daemon=True)
            try:
                helper.start()
            except RuntimeError:
                return  # The system gives no thread. The waiters try the gate themselves.
            self._helper = helper
        self._asked = True
        self._asked_at = monotonic()
        self._wanted.release()

    def _serve_next(self, *, ahead: bool = False) -> bool:
        """Give the gate to the next waiter, if there is one and the gate is free."""
        waiter = self._next()
        if waiter is None or self._hold is not None:
            return False
        if not self._try(waiter.permit, waiter.thread, ahead=ahead):
            return False
        if self.enabled:  # else the whole line was let go on
            self._line(waiter).popleft()
            waiter.granted.release()
        return True

    def _look_again(self, last: bool) -> None:
        """Look whether something was missed; ``last``: before the waiter gives up."""
        self._release_all_lost()
        if last or self._overdue():
            self._serve_next(ahead=True)
        else:
            self._ask()

    def _overdue(self) -> bool:
        """Whether the helper has waited too long. Outlives the calls that wait for it."""
        return self._asked and monotonic() - self._asked_at > PATIENCE_SECONDS

    def _next(self) -> _Waiter | None:
        """The next in line. A ``first`` waits one turn after another ``first``."""
        if self._first and not (self._served_first and self._rest):
            return self._first[0]
        return self._rest[0] if self._rest else None

    def _line(self, waiter: _Waiter) -> deque[_Waiter]:
        """The line ``waiter`` is at the head of; remembers which line was served."""
        self._served_first = bool(self._first) and self._first[0] is waiter
        return self._first if self._served_first else self._rest

    def _serve(self) -> None:
        """Block in ``flock`` for the waiters. Runs in the helper thread, without the mutex."""
        while True:
            self._wanted.acquire()
            failure: OSError | None = None
            try:
                self._file.lock()
            except OSError as error:
                failure = error
            with self._mutex:
                self._asked = False
                if failure is not None:
                    self._disable(failure)
                else:
                    self._hand_over()

    def _hand_over(self) -> None:
        """Pass the lock that the helper won to the next waiter, or let it go."""
        if self._hold is not None:
            return  # A waiter went ahead. Its release serves the next in line.
        if self._next() is None:
            self._file.unlock()
        # If a waiter went ahead and has let go meanwhile, the helper's lock went with it.
        # Locking once more tells, and changes nothing where the lock is still ours.
        elif not self._serve_next(ahead=True):
            self._ask()

    def _wait(self, waiter: _Waiter, timeout_seconds: float | None) -> None:
        """Wait for the grant. Runs without the mutex; raises ``GateTimeout``."""
        began = monotonic()
        while waiter.permit._hold is None:
            pause = OVERDUE_RECHECK_SECONDS if self._overdue() else RECHECK_SECONDS
            if timeout_seconds is not None:
                pause = min(pause, max(0.0, began + timeout_seconds - monotonic()))
            if waiter.granted.acquire(timeout=pause):
                break
            waited = monotonic() - began
            last = timeout_seconds is not None and waited >= timeout_seconds
            with self._mutex:
                self._look_again(last)
            if last and waiter.permit._hold is None:
                raise GateTimeout(self.path, waited, self.holder())
        waiter.permit.waited_seconds = monotonic() - began

    def _give_up(self, permit: Permit, waiter: _Waiter | None) -> None:
        """Leave the line, or give back what was granted meanwhile. Runs without the mutex."""
        with self._mutex:
            for line in (self._first, self._rest):
                if waiter is not None and waiter in line:
                    line.remove(waiter)
        permit.release()

    def _release(self, permit: Permit) -> None:
        """Take ``permit`` back. Takes the mutex itself."""
        with self._mutex:
            hold = permit._hold
            if hold is None:
                return
            self._return(hold)
            permit._hold = None
            if self._hold is None:
                self._ask()

    def _return(self, hold: _Hold) -> None:
        """Count one permit of ``hold`` back and unlock after the last."""
        if hold.permits == 1 and hold is self._hold:
            # Unlock first: if an interrupt strikes here the permit is still due, and its
            # release is repeated when it is collected.
            self._file.unlock()
            self._hold = None
        hold.permits -= 1

    def _release_lost(self, hold: _Hold) -> None:
        """Take back the permit of a collected object. Runs anywhere, without the mutex."""
        # The collector may strike in a thread that has the mutex. Then leave it for later.
        if not self._mutex.acquire(timeout=0.01):
            self._lost.append(hold)
            return
        try:
            self._return(hold)
            self._ask()
        finally:
            self._mutex.release()

    def _release_all_lost(self) -> None:
        while self._lost:
            self._return(self._lost.popleft())

    def _open(self) -> bool:
        """Open the gate file if need be; say whether the gate works."""
        if self.enabled or monotonic() >= self._disabled_until:
            try:
                self._file.open()
                self.enabled = True
            except OSError as error:
                self._disable(error)
        return self.enabled

    def _disable(self, error: OSError) -> None:
        """Go on without a gate for a while, and let all waiters go on, too."""
        self.enabled = False
        self._disabled_until = monotonic() + DISABLED_SECONDS
        if self._hold is not None:
            # Else the other processes, whose gate works, would never get it.
            self._file.unlock()
            self._hold = None
        for waiter in (*self._first, *self._rest):
            waiter.permit._hold = _Hold(waiter.thread)
            waiter.granted.release()
        self._first.clear()
        self._rest.clear()
        warnings.warn(
            f"The writer gate {self.path} cannot be used ({error}). Writes go on without it: "
            "they are safe, but one busy process can hold up the others. Make the file "
            "lockable for everybody who writes the database.",
            RuntimeWarning,
            stacklevel=2,
        )

    def close_files(self) -> None:
        """Close the files of a database that is deleted; the next writer opens those of the next one."""
        with self._mutex:
            if self._hold is None:
                self._file.close()

    def _forget_parent(self) -> None:
        """Begin with an empty state in a forked child. The parent's locks stay the parent's."""
        self._file.close()
        self._reset()


class _Registry:
    """The gates of this process, by each absolute name asked for and by real path."""

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.mutex = threading.Lock()

    def find(self, name: str) -> Gate:
        gate = self.gates.get(name)
        if gate is not None:
            return gate
        real = os.path.realpath(name)
        with self.mutex:
            gate = self.gates.get(real) or self.gates.setdefault(real, Gate(real))
            if os.path.isabs(name):  # A relative name means something else after chdir().
                self.gates[name] = gate
        return gate

    def forget_parent(self) -> None:
        """In a forked child: no lock, no waiter and no helper came along."""
        self.mutex = threading.Lock()
        for gate in set(self.gates.values()):
            gate._forget_parent()


_registry = _Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.forget_parent)


def gate_for(path: str | os.PathLike[str]) -> Gate:
    """Return this process's gate of the database file ``path``, under any of its names."""
    return _registry.find(os.fspath(path))


def gate_of(connection: Any) -> Gate | None:
    """Return the gate of a Django connection, whether it uses Relay's engine or Django's.

    None for memory databases, other vendors, and systems without ``flock``.
    """
    if not SUPPORTED or connection.vendor != "sqlite":
        return None
    name = connection.settings_dict["NAME"]
    known = connection.__dict__.get("_relay_gate")
    if known is not None and known[0] is name:
        return cast(Gate, known[1])
    path = file_of(str(name or ""))
    gate = None if path is None else gate_for(path)
    if gate is not None and os.path.isabs(str(path)):
        # Asked for at every write. A relative name means something else after chdir().
        connection._relay_gate = (name, gate)
    return gate
