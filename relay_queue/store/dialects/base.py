"""The capabilities that a database must offer to the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

Trouble = Literal["busy", "full", "unknown", "data", "tables", "lost", "replaced"]
"""What a database error means for the transaction that it ended; see `Dialect.diagnose`."""


def marks(n: int) -> str:
    """Return the placeholders of ``n`` parameters, as a list of values has them."""
    return ", ".join(["%s"] * n)


class Dialect(ABC):
    """One database engine's way of doing the few things that engines do differently."""

    skip_locked: str
    """The clause that lets concurrent claims pass over each other's rows; empty where one writer
    at a time makes it needless."""

    has_sessions: bool
    """Whether there is a server whose sessions can be notified, and hold locks that end with them."""

    lock_rows: str
    """The clause that locks rows that others may change meanwhile; empty as above."""

    clock: str
    """The expression for the server's clock as a statement runs; NULL where only one transaction
    writes at a time, so that one reading serves for all of it."""

    each_count: str
    """A table of the counts in ``{column}``, a histogram, with its ``key`` and its ``value``. It has no
    row for a text that was altered on disk."""

    has_writable_ctes: bool
    """Whether one statement may change two tables, the second by what the first has changed."""

    bounds_branches: bool
    """Whether the parts of a union need an order and a limit each to be merged row by row.
    Otherwise the planner reads and sorts all of them."""

    shard: str
    """The expression for the shard of `QueueCount` that a transaction writes."""

    freeze_counts: str
    """The statement that ends all writes of counters until the commit; empty as above."""

    freeze_queues: str
    """The statement that waits for the end of every transaction that has read the table of queues, and
    keeps others from reading it until the commit; empty as above."""

    @abstractmethod
    def begin(
        self,
        connection: BaseDatabaseWrapper,
        wait_seconds: float | None,
        *,
        first: bool,
        defer_begin: bool = False,
    ) -> AbstractContextManager[float]:
        """Open a write transaction that begins with the write lock; give the seconds it waited.

        ``wait_seconds`` bounds the wait, None means the connection's own timeout; ``first`` passes
        other threads of this process. ``defer_begin``: where that saves an exchange with a server,
        the transaction begins together with its first statement, or with `opened_at`. Only the
        cursor of `cursor` may be used before. Raises ``OperationalError`` when the wait is over.
        """

    @abstractmethod
    def begin_by_hand(self, connection: BaseDatabaseWrapper) -> None:
        """Begin the transaction of a connection whose autocommit was turned off by hand."""

    @abstractmethod
    def opened_at(self, connection: BaseDatabaseWrapper) -> datetime:
        """Return the one clock reading of a transaction, taken after its write lock was won.

        Only once for each that `begin` has opened.
        """

    @abstractmethod
    def now(self, connection: BaseDatabaseWrapper) -> datetime:
        """Read the clock that leases follow."""

    @abstractmethod
    def to_db(self, moment: datetime) -> Any:
        """Return the parameter to bind for an aware UTC datetime."""

    @abstractmethod
    def from_db(self, value: Any) -> datetime:
        """Return the aware UTC datetime of a raw column value."""

    @abstractmethod
    def cursor(self, connection: BaseDatabaseWrapper) -> Any:
        """Open the cursor that costs this driver least; see `sql`."""

    def post(self, cursor: Any, statement: str, params: Sequence[Any]) -> None:
        """Run a statement whose answer is not needed, or let it wait for the next one.

        Only where this transaction's next statement, or its commit, goes through such a cursor.
        """
        cursor.execute(statement, params)

    @abstractmethod
    def rows(self, count: int, casts: tuple[str, ...]) -> str:
        """Return the query for a table of ``count`` rows given as parameters; ``casts`` are types."""

    @abstractmethod
    def lookup(self, column: str, query: str) -> str:
        """Return a condition to add to a join: that ``column``, an id, is among what ``query``
        finds. The join says the same. But a planner that takes a table for empty would walk over
        it, and with this condition it looks the rows up by id. Empty where no planner does so.
        """

    @abstractmethod
    def row(self, casts: tuple[str, ...]) -> str:
        """Return the parameters of one row, for a SELECT; ``casts`` are types."""

    @abstractmethod
    def bind(self, params: list[Any], casts: tuple[str, ...]) -> list[Any]:
        """Return the parameters of `rows`, from the values row by row."""

    @abstractmethod
    def sql(self, statement: str) -> str:
        """Return a statement in the placeholder style that costs this driver least."""

    @abstractmethod
    def insert_many(
        self, cursor: Any, statement: str, rows: Iterable[Sequence[Any]], count: int
    ) -> Sequence[int | None]:
        """Insert ``count`` rows and return their ids in the order of the rows.

        None stands for a row that another transaction has inserted meanwhile, where the statement
        says that this is no error.
        """

    @abstractmethod
    def diagnose(self, error: Exception) -> Trouble:
        """Say what a database error means.

        ``busy``: nothing happened, try again. ``full``: nothing happened and there is no room.
        ``data``: nothing happened, for a reason that may lie in the values. ``tables``: nothing
        happened, and the values are not to blame: a table, a column, a right, a sequence or a
        prepared statement is not as it was. ``lost``: the connection has ended, or the server takes
        no work. A commit may have happened or not, and every settlement must be repeated over a new
        connection. ``unknown``: the same, and the database is not to be trusted any more.
        ``replaced``: nothing happened, and another file is at the path of the one that is open.
        """

    @abstractmethod
    def check_file(self, connection: BaseDatabaseWrapper) -> None:
        """Raise an error whose trouble is ``replaced`` if that is so; a server has no file."""

    @abstractmethod
    def comes_back(self, error: Exception) -> bool:
        """Say whether this error of a first look at the database may go away by waiting.

        A server that is away comes back. One that refuses this user or knows no such database does
        so until the settings change.
        """

    @abstractmethod
    def is_deadlock_victim(self, error: Exception) -> bool:
        """Say whether a transaction was undone only so that another one can go on.

        Nothing happened, and a second try may succeed. A deadlock ends so for one of the two. A
        statement that was prepared before a column changed is another such case.
        """

    @abstractmethod
    def read_anything(self, connection: BaseDatabaseWrapper) -> None:
        """Let the connection replace bytes that are no text, from now on, instead of raising.

        An altered row can then be read, found out by its checksum, and taken out.
        """

    @abstractmethod
    def tune(self, connection: BaseDatabaseWrapper) -> None:
        """Set how the tables are stored, where that is not set yet; after each ``migrate``."""

    @abstractmethod
    def limit_wait(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        """Bound how long the connection itself waits for the write lock, from now on.

        Nothing is set where others may use the same session with the server, now or later.
        """
