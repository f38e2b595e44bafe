"""What the drill does to a database from outside of Relay, on whatever engine it is.

Rows ask for it by these names. How it is done is the business of `on_file` and `on_server`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path

from django.db import connection

from relay_queue.store.dialects import dialect_for


class Means(ABC):
    """The ways to harm one scratch database, which lies in ``directory`` if it is a file."""

    fault_of_room: str
    """What workers must be prepared with for `no_room`, see `faults`; empty if with nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    has_connections = False
    """Whether workers reach the database by connections that can be cut."""

    @abstractmethod
    def alter_argument(self, stored: str, other: str) -> None:
        """Let another text stand where ``stored`` is, in the payload of a job that nobody runs.

        Both are as long, and differ in one bit of one character.
        """

    @abstractmethod
    def writer_taken(self) -> AbstractContextManager[None]:
        """Keep all workers from their outcomes, as a program does that knows nothing of Relay."""

    @abstractmethod
    def no_room(self) -> AbstractContextManager[None]:
        """Let the database say to the workers that the disk is full."""

    @abstractmethod
    def break_writes(self, pid: int) -> bool:
        """Let writes of a process fail from now on, such that nobody knows what is on disk.

        Returns whether that can be done on this system.
        """

    def cut_connections(self) -> int:
        """End the workers' connections, where there are such, and say how many there were."""
        return 0


def means_for(directory: Path) -> Means:
    """Return the means for the database of this process."""
    # Either needs what the other's project may not have.
    if dialect_for(connection).has_sessions:
        from relay_queue.drill.on_server import ServerMeans

        return ServerMeans(directory)
    from relay_queue.drill.on_file import FileMeans

    return FileMeans(directory)
