"""The files beside a database, opened so that no link can lead the process elsewhere.

The folder of a database may be writable by a group. A member of that group can put a link, a pipe
or a foreign file where a file of ours is expected. A process of another user would then open,
change or give away what it leads to. So nothing here follows a link. Each file is looked at before
it is used, and rights are changed only through a descriptor. The name of the database itself may be
a link: it is resolved once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

OPEN_FILES = "/proc/self/fd"
"""Where the system names open files, so that a path can begin at a descriptor."""

# Not on every system; without O_PATH a folder must be readable, and not only searchable.
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# O_NONBLOCK: a pipe in a file's place must not make us wait for its other end.
_CAREFULLY = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
)
_MOST_TRIES = 5


class NotOurs(PermissionError):
    """Something beside the database is not what it must be, so it was left alone."""

    def __init__(self, path: str, reason: str) -> None:
        text = f"{reason}. See who put it there, then remove it while nothing runs"
        super().__init__(errno.EPERM, text, path)


class Folder:
    """An open directory with files of a database: its own folder, or one beside it.

    ``path`` is for messages. ``number`` is the descriptor, for ``dir_fd``. ``model`` is the
    ``stat`` result of the database, or None as long as there is none: who may write the database
    may use what lies beside it. A context manager, which closes the descriptor.
    """

    def __init__(self, path: str, number: int, model: os.stat_result | None) -> None:
        """Use `of`, `at` or `folder`."""
        self.path = path
        self.number = number
        self.model = model

    @classmethod
    def of(cls, database: str) -> Self:
        """Open the folder in which a database lies. Raises `OSError`."""
        path, name = os.path.split(os.path.realpath(database))
        folder = cls(path, os.open(path, _PATH_ONLY | _DIRECTORY | os.O_CLOEXEC), None)
        try:
            # ``stat`` only: opening and closing the database would drop SQLite's own locks on it.
            folder.model = os.stat(name, dir_fd=folder.number, follow_symlinks=False)
            if stat.S_ISLNK(folder.model.st_mode):
                raise NotOurs(os.path.join(path, name), "the database became a symbolic link")
        except FileNotFoundError:
            pass
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def at(cls, path: str, model: os.stat_result | None, parent: Folder | None = None) -> Self:
        """Open the directory ``path``, which is no link and no stranger's. Raises `OSError`.

        In a ``parent`` only the last part of ``path`` is looked up.
        """
        folder = cls.seen(path, parent)
        folder.model = model
        try:
            _refuse_strangers(path, os.fstat(folder.number), model)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def seen(cls, path: str, parent: Folder | None = None) -> Self:
        """Open the directory ``path``, which is no link, of any owner. Raises `OSError`.

        For callers that only remove from it what they know by its inode.
        """
        name, within = path, None
        if parent is not None:
            name, within = os.path.basename(path), parent.number
        try:
            number = os.open(name, os.O_RDONLY | _DIRECTORY | _CAREFULLY, dir_fd=within)
        except OSError as error:
            raise _explained(error, path, name, within) from error
        return cls(path, number, None)

    def folder(self, name: str) -> Folder:
        """Open the directory ``name`` in this one; make it if it is missing. Raises `OSError`."""
        made = True
        try:
            os.mkdir(name, 0o700, dir_fd=self.number)
        except FileExistsError:
            made = False
        found = type(self).at(os.path.join(self.path, name), self.model, self)
        try:
            # Only an empty one: it may be another directory, renamed to this name a moment ago.
            if _may_change(os.fstat(found.number), made=made) and not os.listdir(found.number):
                self.share(found.number)
        except BaseException:
            found.close()
            raise
        return found

    def file(self, name: str, sizes: Container[int]) -> int:
        """Open a file for reading and writing and return its descriptor; make it if missing.

        ``sizes``, in bytes, are what it may have: a file of another size is something else under
        this name, and may be worth more than ours. Raises `OSError`.
        """
        path = os.path.join(self.path, name)
        for _ in range(_MOST_TRIES):
            made = False
            try:
                number = os.open(name, os.O_RDWR | _CAREFULLY, dir_fd=self.number)
            except FileNotFoundError:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _CAREFULLY
                try:
                    number, made = os.open(name, flags, 0o600, dir_fd=self.number), True
                except FileExistsError:
                    continue  # another process was faster
            except OSError as error:
                raise _explained(error, path, name, self.number) from error
            try:
                status = os.fstat(number)
                _refuse_other_files(path, status, sizes)
                _refuse_strangers(path, status, self.model)
                if _may_change(status, made=made):
                    self.share(number)
            except BaseException:
                os.close(number)
                raise
            return number
        raise NotOurs(path, "it comes and goes")

    def share(self, target: int | str, **where: Any) -> None:
        """Give a file or directory of ours, just made, to those who may write the database.

        ``target`` is a descriptor, or a path with what `os.chmod` takes beside one. It takes the database's group, and
        for root its owner. Without the right to set the group, the group gets no access: it would
        be another group. No database yet: nothing changes.
        """
        if self.model is None:
            return
        access = 0o7 if stat.S_ISDIR(os.stat(target, **where).st_mode) else 0o6
        classes = {6, *(shift for shift in (3, 0) if self.model.st_mode >> shift & stat.S_IWOTH)}
        try:
            owner = self.model.st_uid if os.geteuid() == 0 else -1
            os.chown(target, owner, self.model.st_gid, **where)
        except PermissionError:
            classes.discard(3)
        os.chmod(target, sum(access << shift for shift in classes), **where)

    def share_socket(self, name: str) -> None:
        """`share` the socket ``name`` in this directory, which this process has just bound.

        Raises `OSError`, also if it is no socket of ours any more.
        """
        path = os.path.join(self.path, name)
        if not hasattr(os, "O_PATH") or not os.path.isdir(OPEN_FILES):
            _refuse_other_sockets(path, os.stat(name, dir_fd=self.number, follow_symlinks=False))
            self.share(name, dir_fd=self.number, follow_symlinks=False)
            return
        number = os.open(name, _PATH_ONLY | _CAREFULLY, dir_fd=self.number)
        try:
            _refuse_other_sockets(path, os.fstat(number))
            self.share(f"{OPEN_FILES}/{number}")
        finally:
            os.close(number)

    def identity(self, name: str) -> tuple[int, int] | None:
        """Return device and inode of what is called ``name`` here; None if nothing is."""
        try:
            found = os.stat(name, dir_fd=self.number, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def remove(self, name: str) -> None:
        """Remove the file ``name``, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.number)

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _may_change(status: os.stat_result, *, made: bool) -> bool:
    """Whether the rights of this may be set: it is new, or ours from an earlier time.

    Root changes only what it has made itself: what else is its own may be anything.
    """
    return status.st_uid == os.geteuid() and (made or status.st_uid != 0)


def _refuse_strangers(path: str, status: os.stat_result, model: os.stat_result | None) -> None:
    """Raise `NotOurs` if the owner may not write the database."""
    if status.st_uid in (0, os.geteuid()):
        return
    if model is not None:
        group = model.st_mode & stat.S_IWGRP and status.st_gid == model.st_gid
        if status.st_uid == model.st_uid or group or model.st_mode & stat.S_IWOTH:
            return
    raise NotOurs(path, f"it belongs to user {status.st_uid}, who may not write the database")


def _refuse_other_files(path: str, status: os.stat_result, sizes: Container[int]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotOurs(path, "it is no regular file")
    if status.st_nlink > 1:
        raise NotOurs(path, f"it is one file under {status.st_nlink} names")
    if status.st_size not in sizes:
        raise NotOurs(path, f"it has {status.st_size} bytes, so it is something else")


def _refuse_other_sockets(path: str, status: os.stat_result) -> None:
    ours = status.st_uid == os.geteuid() and status.st_nlink == 1
    if not stat.S_ISSOCK(status.st_mode) or not ours:
        raise NotOurs(path, "it is no longer the socket that was made")


def _explained(error: OSError, path: str, name: str, within: int | None) -> OSError:
    """Return what to raise: systems call a link that is not followed by different names."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
        try:
            if stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
                return NotOurs(path, "it is a symbolic link")
        except OSError:
            pass
    return type(error)(error.errno, error.strerror, path)
