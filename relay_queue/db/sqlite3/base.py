"""The engine: Django's SQLite backend with durable defaults and the writer gate."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Any

from relay_queue.db import replaced
from relay_queue.db.filename import make_absolute
from relay_queue.db.gate import gate_of
from relay_queue.db.sqlite3.creation import DatabaseCreation
from relay_queue.db.sqlite3.cursor import GatedCursor, is_read_only
from relay_queue.db.sqlite3.permits import DEFAULT_TIMEOUT_SECONDS, PermitHolder

JOURNAL_SIZE_LIMIT_BYTES = 64 * 1024 * 1024

# FULL: a commit that was reported is on disk. No mmap: an I/O error must be an error, not a
# signal. The size limit gives the disk back after a burst made the log large.
INIT_COMMANDS = (
    "PRAGMA synchronous=FULL",
    f"PRAGMA journal_size_limit={JOURNAL_SIZE_LIMIT_BYTES}",
    "PRAGMA mmap_size=0",
)


class DatabaseWrapper(PermitHolder):
    """Django's SQLite connection whose writes queue at the database's gate.

    Defaults: WAL, ``synchronous=FULL``, immediate transactions, a
    timeout of 20 s. ``OPTIONS`` goes over all of them: ``init_command`` runs after ours, and
    one that sets ``journal_mode`` keeps WAL from being set.

    With ``transaction_mode`` DEFERRED or EXCLUSIVE every atomic block is gated too, also one
    that only reads: SQLite does not tell beforehand whether it will write.
    """

    creation_class = DatabaseCreation
    init_commands: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_absolute(self.settings_dict)
        self._sets_journal_mode = True

    # ---- Connection -------------------------------------------------------------------

    def get_connection_params(self) -> dict[str, Any]:
        """Return the arguments of ``sqlite3.connect``, our defaults beneath ``OPTIONS``."""
        params: dict[str, Any] = super().get_connection_params()
        self.timeout_seconds = float(params.setdefault("timeout", DEFAULT_TIMEOUT_SECONDS))
        if "transaction_mode" not in self.settings_dict["OPTIONS"]:
            self.transaction_mode = "IMMEDIATE"
        commands = ";".join(self.init_commands).lower()
        self._sets_journal_mode = "journal_mode" not in commands
        self.init_commands = [*INIT_COMMANDS, *self.init_commands]
        return params

    def get_new_connection(self, conn_params: dict[str, Any]) -> sqlite3.Connection:
        """Open the database and make it keep a write-ahead log."""
        self._part_from_foreign_log()
        commands = (command.strip() for command in self.init_commands)
        if not all(is_read_only(command) for command in commands if command):
            self.take_permit()
        try:
            connection: sqlite3.Connection = super().get_new_connection(conn_params)
            if self._sets_journal_mode:
                self._use_wal(connection)
        finally:
            # Also the permit of a connection before this one that was thrown away unclosed.
            self.drop_permit()
        return connection

    def connect(self) -> None:
        """Open the database, and note which file that was."""
        self._relay_file = None  # what was open before has no log to be noted from here on
        super().connect()
        replaced.remember(self)

    def _part_from_foreign_log(self) -> None:
        """Put aside a log that belongs to another file, which was at this path before."""
        gate = gate_of(self)
        if gate is None or not gate.has_foreign_log():
            return
        self.take_permit()
        try:
            gate.part_from_foreign_log()
        except OSError as error:
            raise sqlite3.OperationalError(
                f"the log beside {self.settings_dict['NAME']} belongs to another file and cannot "
                f"be put aside ({error}); stop all processes and move it away"
            ) from error
        finally:
            self.drop_permit()

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """Turn the log on. It stays on in the file, so this writes once in its life."""
        try:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if mode not in ("wal", "memory"):
                self.take_permit()
                connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.Error as error:
            # A connection that can only read has no use for the log.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_READONLY:
                connection.close()
                raise

    def create_cursor(self, name: str | None = None) -> GatedCursor:
        """Return a cursor whose writes pass the gate."""
        cursor: GatedCursor = self.connection.cursor(factory=GatedCursor)
        cursor.db = self
        return cursor

    # ---- Transactions -----------------------------------------------------------------
    # BEGIN takes the permit like every statement that may write, in the cursor.

    def _set_autocommit(self, autocommit: bool) -> None:
        try:
            super()._set_autocommit(autocommit)  # type: ignore[misc]
        finally:
            self.drop_permit_unless_in_transaction()

    def _commit(self) -> None:
        try:
            super()._commit()  # type: ignore[misc]
        finally:
            self.drop_permit_unless_in_transaction()

    def _rollback(self) -> None:
        try:
            super()._rollback()  # type: ignore[misc]
        finally:
            self.drop_permit_unless_in_transaction()

    def _close(self) -> None:
        try:
            if self.in_transaction():
                # A cursor with rows to come keeps a closed connection, its transaction and
                # the write lock alive.
                with suppress(sqlite3.Error):
                    self.connection.rollback()
            super()._close()  # type: ignore[misc]
        finally:
            self.drop_permit()
            if (gate := gate_of(self)) is not None:
                gate.forget_log()  # SQLite takes the log away with the last connection
