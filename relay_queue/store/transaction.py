"""The transaction in which the store's verbs run, and the counters that it keeps exact."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DatabaseError, connections
from django.db import transaction as django_transaction

from relay_queue import conf
from relay_queue.db.fast_atomic import is_watched
from relay_queue.store.dialects import Dialect, dialect_for, marks

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

ADD_TO_COUNTS = """
    WITH change (queue, state, n) AS ({{rows}})
    INSERT INTO relay_queue_queuecount (queue, state, shard, n)
    SELECT queue, state, {shard}, n FROM change WHERE n <> 0
    ON CONFLICT (queue, state, shard) DO UPDATE SET n = relay_queue_queuecount.n + excluded.n
"""
"""Add to the number of jobs per queue and state."""

READ_LOCK_TIMEOUT = "SELECT current_setting('lock_timeout')"
SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %s, true)"
"""Bound how long a statement waits for a lock, until the end of the transaction."""

COUNT_CASTS = ("text", "text", "bigint")

MOST_TRIES = 3
"""Times that work is tried which the database undoes so that another transaction can go on."""

T = TypeVar("T")

_ring: Callable[[str], None] | None = None

Casts = tuple[str, ...]
"""The column types of a VALUES list, for databases that cannot guess them."""


def wake_by(ring: Callable[[str], None]) -> None:
    """Set what wakes the workers: called with the alias of the database, after a transaction.

    The bell stands above the store, which therefore does not import it. If the transaction was
    part of the caller's, what is called has to wait for the caller's commit.
    """
    global _ring  # noqa: PLW0603 - one bell for each process, hung when it is imported
    _ring = ring


@lru_cache(maxsize=2048)
def _with_rows(dialect: Dialect, statement: str, casts: Casts, count: int) -> str:
    return statement.format(rows=dialect.rows(count, casts))


@lru_cache(maxsize=2048)
def _with_ids(statement: str, count: int) -> str:
    return statement.format(ids=marks(count))


class Transaction:
    """One write transaction: a cursor, one reading of the clock, and pending counter changes.

    Every verb of the store takes one. Verbs that share a transaction commit together or not at all.
    """

    def __init__(self, connection: BaseDatabaseWrapper, dialect: Dialect, *, joined: bool) -> None:
        self.connection = connection
        self.dialect = dialect
        self.joined = joined
        self.wakes = False
        """Whether workers are to be woken once this is committed; see `wake`."""
        self._now: datetime | None = None
        self._now_db: Any = None
        # Django's cursor informs the watchers of statements: the query log, wrappers,
        # assertNumQueries. Its layers cost as much as the statements, so without a watcher they are
        # left out.
        watched = is_watched(connection)
        self._cursor: Any = connection.cursor() if watched else dialect.cursor(connection)
        # The query log formats statements itself and knows only Django's own placeholders.
        self._sql = str if watched else dialect.sql
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)

    @property
    def now(self) -> datetime:
        """The one reading of the clock."""
        return self._now or self.read_clock()

    @property
    def now_db(self) -> Any:
        """The same, as the parameter to bind."""
        if self._now_db is None:
            self._now_db = self.dialect.to_db(self.now)
        return self._now_db

    @property
    def read_now_db(self) -> Any:
        """The same if it has been read already, else None: to read it may take an exchange."""
        return None if self._now is None else self.now_db

    def read_clock(self) -> datetime:
        """Take the one reading: at the begin, or when it is first asked for."""
        ask = self.dialect.now if self.joined else self.dialect.opened_at
        self._now = ask(self.connection)
        return self._now

    def rows(
        self, statement: str, casts: Casts, params: list[Any], *rest: Any
    ) -> list[tuple[Any, ...]]:
        """Run a statement whose ``{rows}`` are the values in ``params``, and return its rows.

        Padded with rows of NULL, which match nothing, to a power of two. So a few prepared
        statements serve any number of rows. ``rest`` are the parameters behind the rows.
        """
        if not params:
            return []
        count = 1 << (len(params) // len(casts) - 1).bit_length()
        params += [None] * (count * len(casts) - len(params))
        sql = _with_rows(self.dialect, statement, casts, count)
        return self.fetch(sql, [*self.dialect.bind(params, casts), *rest])

    def ids(self, statement: str, ids: Sequence[Any], *before: Any) -> list[tuple[Any, ...]]:
        """Run a statement over ``{ids}``, padded by repetition as in `rows`; return its rows.

        ``before`` are the parameters in front of the ids.
        """
        if not ids:
            return []
        count = 1 << (len(ids) - 1).bit_length()
        padding = [ids[-1]] * (count - len(ids))
        return self.fetch(_with_ids(statement, count), [*before, *ids, *padding])

    def execute(self, statement: str, params: Sequence[Any] = ()) -> int:
        """Run a statement and return the number of rows that it touched."""
        self._run(self._cursor.execute, statement, params)
        return int(self._cursor.rowcount)

    def post(self, statement: str, params: Sequence[Any] = ()) -> None:
        """Run a statement whose answer is not needed; see `Dialect.post`."""
        self._run(self._post, statement, params)

    def fetch(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement and return all its rows."""
        rows: list[tuple[Any, ...]] = self._run(self._fetch, statement, params)
        return rows

    def insert_many(
        self, statement: str, rows: Iterable[Sequence[Any]], count: int
    ) -> Sequence[int | None]:
        """Insert rows and return their ids, in the order of the rows; see `Dialect.insert_many`."""
        with self.connection.wrap_database_errors:
            return self.dialect.insert_many(self._cursor, self._sql(statement), rows, count)

    def wake(self) -> None:
        """Note that there is something that idle or running workers should hear of at once.

        They are rung after the commit, once however often it is noted. Verbs that make work, make
        room for it, or take a job from its function call it. No caller of a verb has to.
        """
        self.wakes = True

    def count(self, queue: str, state: str, n: int) -> None:
        """Note that a state of a queue has gained ``n`` jobs; written before the commit."""
        self._counts[queue, state] += n

    @contextmanager
    def waiting_at_most(self, time: str) -> Iterator[None]:
        """Bound how long each statement within waits for a lock, ``"20ms"``; see `Dialect.lock_rows`.

        The bound of before comes back, also if the transaction is the caller's. If a statement fails,
        the transaction or its savepoint is undone, and the bound with it.
        """
        if not self.dialect.lock_rows:  # one writer at a time, and no lock to wait for
            yield
            return
        ((before,),) = self.fetch(READ_LOCK_TIMEOUT)
        self.fetch(SET_LOCK_TIMEOUT, [time])
        yield
        self.fetch(SET_LOCK_TIMEOUT, [before])

    def _run(self, act: Callable[[str, Sequence[Any]], Any], statement: str, params: Any) -> Any:
        if self.connection.needs_rollback:
            self.connection.validate_no_broken_transaction()
        try:
            return act(self._sql(statement), params)
        except Exception:
            # Entered only now: around each statement it would cost a tenth of the statement.
            with self.connection.wrap_database_errors:
                raise

    def _post(self, sql: str, params: Sequence[Any]) -> None:
        # In the caller's transaction the next statement, or the commit, may be the caller's.
        if self.joined:
            self._cursor.execute(sql, params)
        else:
            self.dialect.post(self._cursor, sql, params)

    def _fetch(self, sql: str, params: Sequence[Any]) -> Any:
        self._cursor.execute(sql, params)
        # Some drivers will not be asked for the rows of a statement that has none.
        return self._cursor.fetchall() if self._cursor.description else []

    def pending(self, queue: str, state: str) -> int:
        """Return how many jobs this transaction has added to a state and not yet written."""
        return self._counts[queue, state]

    def gained(self) -> set[tuple[str, str]]:
        """Return the queues, and states in them, to which jobs were added and not yet written."""
        return {place for place, n in self._counts.items() if n > 0}

    def flush(self, *, last: bool = False) -> None:
        """Write the pending counter changes. In sorted order, so that no two writers deadlock.

        ``last``: nothing but the commit comes behind, and they may travel with it.
        """
        changes = sorted((q, s, n) for (q, s), n in self._counts.items() if n)
        self._counts.clear()
        if changes:
            params = [value for change in changes for value in change]
            statement = ADD_TO_COUNTS.format(shard=self.dialect.shard)
            sql = _with_rows(self.dialect, statement, COUNT_CASTS, len(changes))
            write = self.post if last else self.execute
            write(sql, self.dialect.bind(params, COUNT_CASTS))

    def close(self) -> None:
        """Give the cursor back."""
        self._cursor.close()


class transaction:  # noqa: N801 - used as a function, like Django's ``atomic``
    """Open a write transaction on the queue's database, or join the caller's.

    ``with transaction() as tx:``. Joined, nothing is locked here and the caller's commit decides:
    an enqueue inside ``atomic()`` lives and dies with the caller's rows. ``wait_seconds`` bounds
    the wait for the writer, and ``first`` lets a worker's loop pass its own process's other
    threads. ``defer_begin`` may save an exchange with a server, see `Dialect.begin`. No savepoint
    may come before the first statement then, and a dead connection raises instead of being opened
    again. After the commit workers are woken if a verb has noted that; with ``rings=False`` that is
    left to the caller. Raises ``OperationalError`` if the wait was too long.
    """

    __slots__ = ("_block", "_tx", "defer_begin", "first", "rings", "wait_seconds")

    def __init__(
        self,
        *,
        wait_seconds: float | None = None,
        first: bool = False,
        defer_begin: bool = False,
        rings: bool = True,
    ) -> None:
        self.wait_seconds = wait_seconds
        self.first = first
        self.defer_begin = defer_begin
        self.rings = rings

    def __enter__(self) -> Transaction:
        connection = connections[conf.get().database]
        dialect = dialect_for(connection)
        self._block: AbstractContextManager[Any]
        joined = connection.in_atomic_block or not connection.get_autocommit()
        if joined:
            if not connection.in_atomic_block:
                dialect.begin_by_hand(connection)
            self._block = django_transaction.atomic(using=connection.alias)
        else:
            defer_begin = self.defer_begin and not is_watched(connection)
            self._block = dialect.begin(
                connection, self.wait_seconds, first=self.first, defer_begin=defer_begin
            )
        self._block.__enter__()
        try:
            self._tx = Transaction(connection, dialect, joined=joined)
            if not self.defer_begin:
                self._tx.read_clock()
        except BaseException:
            self._block.__exit__(*sys.exc_info())
            raise
        return self._tx

    def __exit__(self, *exc_info: Any) -> None:
        try:
            if exc_info[0] is None:
                self._tx.flush(last=True)
        except BaseException:
            exc_info = sys.exc_info()
            raise
        finally:
            # If the connection was closed inside, the cursor cannot be closed. The block must end
            # even then.
            with suppress(Exception):
                self._tx.close()
            self._block.__exit__(*exc_info)
        # After the commit, or after the savepoint: what is rolled back wakes no worker.
        if exc_info[0] is None and self._tx.wakes and self.rings and _ring is not None:
            _ring(self._tx.connection.alias)


def in_transaction(work: Callable[[Transaction], T]) -> T:
    """Return what ``work`` returns in a transaction of its own, or in the caller's.

    A database that ends a deadlock chooses one transaction and undoes it. If that is one of our
    own, ``work`` is tried again, at most ``MOST_TRIES`` times in all. Inside the caller's it
    raises, since the caller's own statements are undone, too. Raises what ``work`` raises.
    """
    for left in reversed(range(MOST_TRIES)):
        try:
            with transaction() as tx:
                return work(tx)
        except DatabaseError as error:
            connection = connections[conf.get().database]
            joined = connection.in_atomic_block or not connection.get_autocommit()
            if joined or not left or not dialect_for(connection).is_deadlock_victim(error):
                raise
    raise AssertionError("the last try returns or raises")
