"""Statements that a PostgreSQL server keeps prepared, sent with as few steps as possible.

The driver's own cursor is made for any statement. A worker sends the same dozen statements all day,
and the driver's layers took most of its processor time. Measured for one short statement: 22 us
with the driver's cursor, 6 us with this one, 2 us where several travel together.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors, pq
from psycopg.adapt import AdaptersMap, Transformer

# The driver's own: Django's loader of times, for one, is written in Python.
ADAPTERS: Final = AdaptersMap(psycopg.adapters)

MOST_PREPARED: Final = 200
"""Statements that a connection keeps. At one more it drops all of them and starts over."""

EXCHANGED_AT_ONCE: Final = 500

EXCHANGED_BYTES: Final = 4 * 1024 * 1024
"""Rows of `PreparedCursor.execute_each` that wait in memory for their answers, and about how many bytes
of values: one row more, which a payload bounds, than fits."""

STALE: Final = ("0A000", "26000")
"""What the server says of a prepared statement whose columns have changed, or that it does not know."""

_STALE: Final = frozenset(state.encode() for state in STALE)

_OIDS: Final[dict[type, int]] = {
    type_: psycopg.adapters.types[name].oid
    for type_, name in ((int, "int8"), (float, "float8"), (bool, "bool"), (datetime, "timestamptz"))
}
"""The types that are sent to the server. It finds out the others, texts among them, by itself."""

_Key = tuple[str, tuple[int, ...]]
"""A statement, and the types of its values."""

_by_connection: WeakKeyDictionary[psycopg.Connection[Any], _ConnectionState] = WeakKeyDictionary()


class _Message(NamedTuple):
    """One statement with its values, ready to be sent."""

    statement: str
    oids: tuple[int, ...]
    values: list[bytes | None]
    keep: bool = False


class _ConnectionState:
    """What is known of one connection: its prepared statements, and what waits to be sent."""

    def __init__(self, descriptor: int) -> None:
        self.names: dict[_Key, bytes] = {}
        self.posted: list[_Message] = []
        self.kept: pq.abc.PGresult | None = None
        self.prepared = 0
        self.descriptor = descriptor
        self.poll = select.poll()
        self.poll.register(descriptor, select.POLLIN)


class PreparedCursor:
    """Runs statements with ``$1`` for values on a driver's connection, from one thread.

    Begins a transaction when the connection wants one. ``pooled``: a pooler gives each transaction
    another server connection, so nothing stays prepared.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, pooled: bool) -> None:
        self.connection = connection
        self.adapters = ADAPTERS
        self.rowcount = -1
        self._pgconn = connection.pgconn
        self._state = _state_of(connection)
        # A driver that prepares statements by itself now and then drops all that are prepared.
        self._prepares = not pooled and connection.prepare_threshold is None
        self._transformer = Transformer(self)
        self._result: pq.abc.PGresult | None = None

    def execute(self, statement: str, params: Sequence[Any] = ()) -> None:
        """Run a statement, and before it what was posted, in one exchange with the server.

        Raises the driver's error, be it of the statement or of what was posted.
        """
        self._take(self._exchange([_message(statement, params)])[-1])

    def execute_each(
        self, statement: str, rows: Iterable[Sequence[Any]]
    ) -> Iterator[tuple[Any, ...] | None]:
        """Run a statement for each row of values; yield the first row of each answer, if any."""
        messages = (_message(statement, row) for row in rows)
        for batch in _batches(messages):
            for answer in self._exchange(batch)[-len(batch) :]:
                self._take(answer)
                yield self.fetchone()

    def begin(self) -> None:
        """Begin a transaction of Relay's own, together with what comes next."""
        self._state.posted.append(OWN_BEGIN)

    def post(self, statement: str, params: Sequence[Any] = (), *, keep: bool = False) -> None:
        """Send a statement together with the next one that is executed on this connection.

        ``keep``: its answer is kept until `kept` asks for it.
        """
        self._state.posted.append(_message(statement, params)._replace(keep=keep))

    def send(self) -> None:
        """Send what was posted now."""
        if self._state.posted:
            self._exchange([])

    def kept(self) -> tuple[Any, ...] | None:
        """Return the first row of the answer that was to be kept, once; send the statement if need be."""
        if any(message.keep for message in self._state.posted):
            self._exchange([])
        self._result, self._state.kept = self._state.kept, None
        return self.fetchone() if self._result is not None else None

    def forget(self) -> None:
        """Drop what was posted: its transaction is undone."""
        self._state.posted.clear()
        self._state.kept = None

    @property
    def description(self) -> int:
        """How many columns the answer has: none means that there are no rows to ask for."""
        return 0 if self._result is None else self._result.nfields

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return all rows of the last statement."""
        result = self._result
        assert result is not None, "a statement was run"
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the first row of the last statement."""
        rows = self.fetchall()
        return rows[0] if rows else None

    def close(self) -> None:
        """Let the last answer go."""
        self._result = None

    def _take(self, result: pq.abc.PGresult) -> None:
        self._result = result
        self.rowcount = -1 if result.command_tuples is None else result.command_tuples

    def _exchange(self, messages: list[_Message]) -> list[pq.abc.PGresult]:
        """Send what was posted, then messages, all as one, and return the answers."""
        state, pgconn = self._state, self._pgconn
        if pgconn.status != pq.ConnStatus.OK:
            raise errors.OperationalError("the connection is closed")
        messages = self._beforehand() + state.posted + messages
        state.posted = []
        pgconn.enter_pipeline_mode()
        try:
            sent = [prepared for message in messages for prepared in self._send(message)]
            pgconn.pipeline_sync()
            answers = self._receive(len(sent))
            pgconn.exit_pipeline_mode()
        except BaseException:
            self.connection.close()  # what is still on its way would be taken for later answers
            raise
        for prepared, answer in zip(sent, answers, strict=True):
            if answer.status == pq.ExecStatus.FATAL_ERROR:
                if answer.error_field(pq.DiagnosticField.SQLSTATE) in _STALE:
                    state.names.clear()  # what was prepared is asked for under new names
                raise errors.error_from_result(answer)
            if prepared is not None:
                state.names.update([prepared])
        answers = [a for prepared, a in zip(sent, answers, strict=True) if prepared is None]
        for message, answer in zip(messages, answers, strict=True):
            if message.keep:
                state.kept = answer
        return answers

    def _beforehand(self) -> list[_Message]:
        """Return what must be sent before anything else."""
        first = []
        if len(self._state.names) >= MOST_PREPARED:
            self._state.names.clear()
            first.append(_message("DEALLOCATE ALL"))
        idle = self._pgconn.transaction_status == pq.TransactionStatus.IDLE
        begun = self._state.posted[:1] == [OWN_BEGIN]
        if idle and not begun and not self.connection.autocommit:
            first.append(_begin(self.connection))
        return first

    def _send(self, message: _Message) -> Iterator[tuple[_Key, bytes] | None]:
        """Send one message; yield for each answer to come what it has prepared, None for its own."""
        statement = message.statement.encode()
        if not (message.values and self._prepares):
            self._pgconn.send_query_params(statement, message.values, message.oids)
            yield None
            return
        key = (message.statement, message.oids)
        name = self._state.names.get(key)
        if name is None:
            self._state.prepared += 1
            name = b"relay_%d" % self._state.prepared
            self._pgconn.send_prepare(name, statement, message.oids)
            yield key, name
        self._pgconn.send_query_prepared(name, message.values)
        yield None

    def _receive(self, count: int) -> list[pq.abc.PGresult]:
        answers = []
        for _ in range(count):
            answer = self._next()
            if answer is None:  # the connection broke: no fault of the values
                raise errors.OperationalError("the server ended the exchange early")
            answers.append(answer)
            self._next()  # the end of that answer
        self._next()  # the end of the exchange
        return answers

    def _next(self) -> pq.abc.PGresult | None:
        """Wait as Python waits: other threads run meanwhile, and an interrupt gets through."""
        pgconn, state = self._pgconn, self._state
        while pgconn.is_busy():
            unsent = pgconn.flush() == 1
            state.poll.modify(state.descriptor, select.POLLIN | (select.POLLOUT if unsent else 0))
            state.poll.poll()
            pgconn.consume_input()
        return pgconn.get_result()


def _state_of(connection: psycopg.Connection[Any]) -> _ConnectionState:
    state = _by_connection.get(connection)
    if state is None:
        state = _by_connection[connection] = _ConnectionState(connection.fileno())
    return state


@lru_cache(maxsize=1024)
def numbered(statement: str) -> str:
    """Return a statement with ``$1`` and so on instead of ``%s``."""
    first, *others = statement.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, start=1))


def _batches(messages: Iterable[_Message]) -> Iterator[list[_Message]]:
    """Yield messages by as many as are exchanged at once."""
    batch: list[_Message] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += sum([len(value) for value in message.values if value])
        if len(batch) >= EXCHANGED_AT_ONCE or size >= EXCHANGED_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _begin(connection: psycopg.Connection[Any]) -> _Message:
    level = connection.isolation_level
    wanted = "" if level is None else f" ISOLATION LEVEL {level.name.replace('_', ' ')}"
    return _message(f"BEGIN{wanted}")


def _message(statement: str, params: Sequence[Any] = ()) -> _Message:
    oids = tuple([_OIDS.get(type(value), 0) for value in params])
    return _Message(statement, oids, [None if value is None else _text(value) for value in params])


def array(values: Sequence[Any], cast: str) -> str:
    """Return an array as the server reads it."""
    if cast == "text":
        words = ["NULL" if value is None else _quoted(value) for value in values]
    else:
        words = ["NULL" if value is None else _plain(value) for value in values]
    return f"{{{','.join(words)}}}"


def _quoted(value: Any) -> str:
    # Through str: an altered row may have anything, and a member of an enumeration is its value.
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _text(value: Any) -> bytes:
    """Return a value as the server reads it."""
    if isinstance(value, str):
        if "\0" in value:  # the driver's library would cut it off there
            raise errors.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return value.encode()
    if isinstance(value, datetime):
        return value.isoformat().encode()
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int | float):
        return str(value).encode()
    if isinstance(value, list):
        return array(value, "text" if any(isinstance(v, str) for v in value) else "").encode()
    raise errors.ProgrammingError(f"cannot send {value!r} of type {type(value).__name__}")


OWN_BEGIN: Final = _message("BEGIN ISOLATION LEVEL READ COMMITTED")
"""On any isolation level of the connection, the role or the database. What is counted after the
wait for a lock must not come from a snapshot that was taken before it. Limits would be exceeded."""
