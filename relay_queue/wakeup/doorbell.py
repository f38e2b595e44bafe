"""The doorbell beside an SQLite database.

Each worker process hangs a `Doorbell`, a Unix datagram socket, in the directory
`<database>-bells/`. A process that commits work rings every bell found there.
"""

import os
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

from relay_queue.db.beside import OPEN_FILES, Folder
from relay_queue.logs import get_logger

logger = get_logger(__name__)

BELLS_SUFFIX = "-bells"
# The smallest limit of the supported systems (macOS); Linux takes 107 bytes.
SOCKET_PATH_BYTES = 103
RING = b"!"
# More than any system queues for one socket. It bounds `clear` while rings keep coming.
MOST_RINGS_PER_CLEAR = 1_000

_bells: "weakref.WeakSet[Doorbell]" = weakref.WeakSet()


class Doorbell:
    """The listening end, one per worker process.

    Every process that can write the database can ring the bell: the directory and the socket take
    the database's group and mode. A forked child loses the bell and the parent keeps it.
    """

    def __init__(self, database_path: str, name: str) -> None:
        """Hang a bell called `name`, which must be random, beside the database.

        Raises `OSError` where that is impossible; a worker can then only look now and then.
        """
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no Unix sockets, so no worker can hang a doorbell")
        directory = os.path.realpath(database_path) + BELLS_SUFFIX
        self.path = os.path.join(directory, name)
        self._identity: tuple[int, int] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            with (
                Folder.of(database_path) as beside,
                beside.folder(os.path.basename(directory)) as folder,
            ):
                self._hang(folder, name)
        except BaseException:
            self._socket.close()
            raise
        _bells.add(self)

    def _hang(self, folder: Folder, name: str) -> None:
        # A socket file exists a moment before it answers and before its rights are set. Under
        # its own name it could be taken for a dead one in that moment and be removed.
        hidden = f".{name}"
        with _address(folder, hidden, exactly=True) as place:
            self._socket.bind(f"{place}/{hidden}")
        try:
            folder.share_socket(hidden)
            self._identity = folder.identity(hidden)
            os.rename(hidden, name, src_dir_fd=folder.number, dst_dir_fd=folder.number)
        except BaseException:
            folder.remove(hidden)
            raise

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a ring, for `selectors`."""
        return self._socket.fileno()

    def clear(self) -> int:
        """Take the pending rings off the bell, at most a thousand, and return how many."""
        for count in range(MOST_RINGS_PER_CLEAR):
            try:
                self._socket.recv(len(RING))
            except BlockingIOError:
                return count
        return MOST_RINGS_PER_CLEAR

    def close(self) -> None:
        """Take the bell down. Only its own socket file is removed. May be called twice."""
        identity, self._identity = self._identity, None
        if identity is not None:
            directory, name = os.path.split(self.path)
            with suppress(OSError), Folder.seen(directory) as folder:
                if folder.identity(name) == identity:
                    folder.remove(name)
        self._socket.close()

    def _leave_to_parent(self) -> None:
        """Close the child's copy after a fork, without removing the socket file.

        Kept open, it would go on taking rings after the parent's death.
        """
        self._identity = None
        self._socket.close()


def ring(database_path: str) -> int:
    """Ring every bell beside the database once and return how many took the ring.

    Never raises and never waits. The caller has just committed, and would enqueue again if it
    got an error. A worker whose bell is full has rings pending, so nothing is lost. The socket
    files of dead workers are removed.
    """
    try:
        return _ring_all(database_path)
    except Exception:
        logger.debug("No bell was rung beside %r", database_path, exc_info=True)
        return 0


def _ring_all(database_path: str) -> int:
    # Resolving links costs more than the rest of a ring, a stat does not. A link that points
    # elsewhere now, or another working directory, shows up as another inode.
    database = os.stat(database_path)
    directory = _bells_directory(database_path, database.st_dev, database.st_ino)
    with Folder.at(directory, database) as folder:
        names = _bells_in(folder)
        if not names:
            return 0
        with (
            _address(folder, max(names, key=len)) as place,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)
            return sum(_ring_one(sender, folder, place, name) for name in names)


def _bells_in(folder: Folder) -> list[str]:
    with os.scandir(folder.number) as entries:
        # A link would send the ring to any socket that it leads to.
        return [e.name for e in entries if not (e.name.startswith(".") or e.is_symlink())]


def _ring_one(sender: socket.socket, folder: Folder, place: str, name: str) -> bool:
    try:
        sender.sendto(RING, f"{place}/{name}")
    except ConnectionRefusedError:
        _remove_dead(folder, name)
        return False
    except OSError:
        return False
    return True


def _remove_dead(folder: Folder, name: str) -> None:
    """Remove a socket file that refused a ring: its process is gone, and names are random."""
    with suppress(OSError):
        found = os.stat(name, dir_fd=folder.number, follow_symlinks=False)
        if stat.S_ISSOCK(found.st_mode):
            folder.remove(name)


@lru_cache(maxsize=32)
def _bells_directory(database_path: str, _device: int, _inode: int) -> str:
    return os.path.realpath(database_path) + BELLS_SUFFIX


@contextmanager
def _address(folder: Folder, name: str, *, exactly: bool = False) -> Iterator[str]:
    """Yield a path to the open folder through which a socket called `name` can be addressed.

    `exactly`: through its descriptor if the system can, so that no link put in its place leads
    elsewhere. That takes longer, and a ring that goes astray does no harm.
    """
    short = len(os.fsencode(f"{folder.path}/{name}")) <= SOCKET_PATH_BYTES
    if (exactly or not short) and os.path.isdir(OPEN_FILES):
        yield f"{OPEN_FILES}/{folder.number}"
    elif short:
        yield folder.path
    else:
        # A private link of this process, so no other user can prepare or redirect it.
        with tempfile.TemporaryDirectory(prefix="relay-") as alias:
            link = os.path.join(alias, "b")
            os.symlink(folder.path, link)
            yield link


def _leave_bells_to_parent() -> None:
    for bell in list(_bells):
        bell._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_bells_to_parent)
