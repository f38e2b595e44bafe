"""The engine's rules: when the gate is held, when it is let go, what its errors say."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from relay_queue.db.gate import gate_for, gate_of
from relay_queue.db.sqlite3.permits import UNGATED
from tests.conftest import wait_until
from tests.db.conftest import DJANGOS_ENGINE, held_elsewhere, is_locked

Rows = Callable[[], list[int]]


def execute(connection: Any, sql: str, params: Any = None) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchall() if cursor.description else None


def probe(connection: Any, gate_path: Path) -> list[bool]:
    """Add the SQL function ``probe()``, which notes whether the gate is held at that moment."""
    seen: list[bool] = []

    def note() -> int:
        seen.append(is_locked(gate_path))
        return len(seen)

    connection.ensure_connection()
    connection.connection.create_function("probe", 0, note)
    return seen


def can_write(database: Path) -> bool:
    """Say whether SQLite itself would let somebody write now."""
    with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as plain:
        try:
            plain.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


# ---- Defaults -----------------------------------------------------------------------------


def test_a_fresh_file_gets_durable_defaults(connection: Any) -> None:
    def pragma(name: str) -> Any:
        return execute(connection, f"PRAGMA {name}")[0][0]

    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 2
    assert pragma("journal_size_limit") == 64 * 1024 * 1024
    assert pragma("foreign_keys") == 1
    assert connection.transaction_mode == "IMMEDIATE"


def test_the_timeout_is_twenty_seconds_unless_set(connect: Any) -> None:
    connection = connect(timeout=1.5)
    assert execute(connection, "PRAGMA busy_timeout") == [(1500,)]
    del connection.settings_dict["OPTIONS"]["timeout"]
    connection.close()
    assert execute(connection, "PRAGMA busy_timeout") == [(20000,)]


def test_the_users_init_command_goes_over_ours(connect: Any) -> None:
    connection = connect(init_command="PRAGMA synchronous=NORMAL; PRAGMA cache_size=-1234")
    assert execute(connection, "PRAGMA synchronous") == [(1,)]
    assert execute(connection, "PRAGMA cache_size") == [(-1234,)]
    assert execute(connection, "PRAGMA journal_mode") == [("wal",)]


def test_the_users_journal_mode_is_kept(connect: Any) -> None:
    connection = connect(init_command="PRAGMA journal_mode=TRUNCATE")
    assert execute(connection, "PRAGMA journal_mode") == [("truncate",)]


def test_an_init_command_that_writes_passes_the_gate(
    connect: Any, connection: Any, gate_path: Path, rows: Rows
) -> None:
    writing = connect(timeout=0.01, init_command="INSERT INTO t VALUES (1)")
    with held_elsewhere(gate_path), pytest.raises(OperationalError, match="database is locked"):
        writing.ensure_connection()
    writing.ensure_connection()
    assert rows() == [1]
    assert not is_locked(gate_path)


def test_an_init_command_that_fails_lets_the_gate_go(connect: Any, gate_path: Path) -> None:
    failing = connect(init_command="INSERT INTO missing VALUES (1)")
    with pytest.raises(OperationalError, match="no such table"):
        failing.ensure_connection()
    assert not is_locked(gate_path)
    assert failing.permit is None


# The connection left behind is closed by its last reference; a recorded warning is one.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_connection_that_is_thrown_away_unclosed_gives_the_gate_back(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    transaction.atomic(using=connection.alias).__enter__()
    connection.connection = None
    gc.collect()
    connection.connect()
    assert not is_locked(gate_path)
    execute(connection, "INSERT INTO t VALUES (1)")
    assert rows() == [1]


@pytest.mark.parametrize("mode", ["DEFERRED", "EXCLUSIVE", "immediate", None])
def test_the_users_transaction_mode_is_kept_and_gated(
    connect: Any, gate_path: Path, mode: str | None
) -> None:
    connection = connect(transaction_mode=mode)
    with transaction.atomic(using=connection.alias):
        assert is_locked(gate_path)
        assert connection.transaction_mode == (mode.upper() if mode else None)
    assert not is_locked(gate_path)


def test_a_file_that_can_only_be_read_can_be_read(connect: Any, database: Path) -> None:
    with closing(sqlite3.connect(database)) as plain:
        plain.execute("CREATE TABLE t (n)")
    connection = connect(name=f"file:{database}?mode=ro")
    assert execute(connection, "SELECT * FROM t") == []
    with pytest.raises(OperationalError, match="readonly"):
        execute(connection, "INSERT INTO t VALUES (1)")


def test_many_processes_may_open_a_fresh_file_at_once(connect: Any, database: Path) -> None:
    connection = connect(timeout=20.0)
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(6)

    def open_and_write() -> None:
        ready.wait(60)
        execute(connection, "CREATE TABLE IF NOT EXISTS t (n)")
        execute(connection, "INSERT INTO t VALUES (1)")

    processes = [context.Process(target=open_and_write) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    with closing(sqlite3.connect(database)) as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert plain.execute("SELECT count(*) FROM t").fetchone() == (6,)


# ---- Atomic blocks ------------------------------------------------------------------------


def test_an_atomic_block_holds_the_gate_from_begin_to_commit(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    with transaction.atomic(using=connection.alias):
        assert is_locked(gate_path)
        execute(connection, "INSERT INTO t VALUES (1)")
        with transaction.atomic(using=connection.alias):
            execute(connection, "INSERT INTO t VALUES (2)")
        assert is_locked(gate_path)
    assert not is_locked(gate_path)
    assert rows() == [1, 2]


def test_the_gate_comes_before_sqlites_own_lock(
    connection: Any, database: Path, gate_path: Path
) -> None:
    """The other order would let a waiter for the gate keep the gate's holder from writing."""

    def write() -> None:
        with transaction.atomic(using=connection.alias):
            pass
        connection.close()

    connection.inc_thread_sharing()
    with held_elsewhere(gate_path):
        thread = threading.Thread(target=lambda: _in_alias(connection, write))
        thread.start()
        wait_until(lambda: gate_for(database)._asked)
        assert can_write(database)
    thread.join()


def _in_alias(connection: Any, function: Callable[[], None]) -> None:
    connections[connection.alias] = connection
    function()


def test_a_rollback_lets_the_gate_go(connection: Any, gate_path: Path, rows: Rows) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=connection.alias):  # noqa: PT012
        execute(connection, "INSERT INTO t VALUES (1)")
        raise ZeroDivisionError
    assert not is_locked(gate_path)
    assert rows() == []


def test_a_failed_begin_lets_the_gate_go(
    connect: Any, connection: Any, database: Path, gate_path: Path
) -> None:
    impatient = connect(timeout=0.01)
    with closing(sqlite3.connect(database, isolation_level=None)) as plain:
        plain.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperationalError), transaction.atomic(using=impatient.alias):
            pass
        assert not is_locked(gate_path)
    with transaction.atomic(using=impatient.alias):
        assert is_locked(gate_path)


def test_a_failed_commit_lets_the_gate_go_with_the_rollback(
    connection: Any, gate_path: Path
) -> None:
    execute(connection, "CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    reference = "REFERENCES parent DEFERRABLE INITIALLY DEFERRED"
    execute(connection, f"CREATE TABLE child (parent INTEGER {reference})")
    with pytest.raises(IntegrityError), transaction.atomic(using=connection.alias):
        execute(connection, "INSERT INTO child VALUES (7)")
    assert not is_locked(gate_path)
    assert execute(connection, "SELECT * FROM child") == []


def test_closing_in_the_middle_of_a_block_lets_the_gate_and_the_lock_go(
    connection: Any, database: Path, gate_path: Path, rows: Rows
) -> None:
    with transaction.atomic(using=connection.alias):
        execute(connection, "INSERT INTO t VALUES (1), (2), (3)")
        cursor = connection.cursor()
        cursor.execute("SELECT n FROM t")
        connection.close()
        assert not is_locked(gate_path)
        # Rows of the cursor are still to come, which keeps a closed connection alive.
        assert can_write(database)
        del cursor
        with pytest.raises(DatabaseError):
            execute(connection, "INSERT INTO t VALUES (2)")
    assert rows() == []
    execute(connection, "INSERT INTO t VALUES (3)")
    assert rows() == [3]


# A recorded warning would keep the connection, and so its lock, alive.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_thread_that_dies_in_a_block_gives_the_gate_back(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    def die() -> None:
        transaction.atomic(using=connection.alias).__enter__()
        execute(connections[connection.alias], "INSERT INTO t VALUES (1)")

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    gc.collect()
    execute(connection, "INSERT INTO t VALUES (2)")
    assert rows() == [2]


def test_ctrl_c_inside_a_statement_keeps_the_block_consistent(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    def strike(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), transaction.atomic(using=connection.alias):  # noqa: PT012
        execute(connection, "INSERT INTO t VALUES (1)")
        with connection.execute_wrapper(strike):
            execute(connection, "INSERT INTO t VALUES (2)")
    assert not is_locked(gate_path)
    assert rows() == []


# ---- SQLite rolls back by itself --------------------------------------------------------------


@contextmanager
def nearly_full_disk(room_bytes: int) -> Iterator[None]:
    """Let every write past this file offset fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_ends_the_block_and_nothing_of_it_survives(
    connect: Any, connection: Any, gate_path: Path, rows: Rows
) -> None:
    small = connect(init_command="PRAGMA cache_size=10; PRAGMA wal_autocheckpoint=0")
    small.ensure_connection()
    with nearly_full_disk(2_000_000), transaction.atomic(using=small.alias):
        execute(small, "INSERT INTO t VALUES (1)")
        with pytest.raises(OperationalError), small.cursor() as cursor:
            cursor.executemany("INSERT INTO t VALUES (zeroblob(%s))", [(50_000,)] * 100)
        assert not small.connection.in_transaction
        assert not is_locked(gate_path)
        for _ in range(2):
            with pytest.raises(TransactionManagementError):
                execute(small, "INSERT INTO t VALUES (2)")
    assert rows() == []
    execute(small, "INSERT INTO t VALUES (3)")
    assert rows() == [3]


LOSE = "INSERT OR ROLLBACK INTO u VALUES (1)"


@pytest.fixture
def losing(connection: Any) -> Any:
    """Return a connection on which the statement ``LOSE`` makes SQLite roll everything back."""
    execute(connection, "CREATE TABLE u (n INTEGER UNIQUE)")
    execute(connection, "INSERT INTO u VALUES (1)")
    return connection


def test_a_lost_transaction_lets_the_gate_go_at_once(losing: Any, gate_path: Path) -> None:
    with transaction.atomic(using=losing.alias):
        with pytest.raises(IntegrityError):
            execute(losing, LOSE)
        assert not is_locked(gate_path)


def test_a_lost_transaction_refuses_every_later_statement(losing: Any, rows: Rows) -> None:
    with transaction.atomic(using=losing.alias):
        execute(losing, "INSERT INTO t VALUES (1)")
        with pytest.raises(IntegrityError):
            execute(losing, LOSE)
        with pytest.raises(TransactionManagementError) as raised:
            execute(losing, "INSERT INTO t VALUES (2)")
        assert isinstance(raised.value.__cause__, sqlite3.IntegrityError)
        with pytest.raises(TransactionManagementError):
            execute(losing, "SELECT * FROM t")
    assert rows() == []


def test_a_transaction_lost_inside_a_savepoint_spoils_the_outer_block(
    losing: Any, rows: Rows
) -> None:
    with transaction.atomic(using=losing.alias):
        execute(losing, "INSERT INTO t VALUES (1)")
        with pytest.raises(IntegrityError), transaction.atomic(using=losing.alias):
            execute(losing, LOSE)
        with pytest.raises(TransactionManagementError):
            execute(losing, "INSERT INTO t VALUES (2)")
    assert rows() == []


def test_a_lost_transaction_cannot_be_argued_away(losing: Any, rows: Rows) -> None:
    with transaction.atomic(using=losing.alias):
        with pytest.raises(IntegrityError):
            execute(losing, LOSE)
        transaction.set_rollback(False, using=losing.alias)
        with pytest.raises(TransactionManagementError, match="has ended already"):
            execute(losing, "INSERT INTO t VALUES (2)")
    assert rows() == []


def test_a_transaction_lost_in_executemany_is_noticed(losing: Any, gate_path: Path) -> None:
    with transaction.atomic(using=losing.alias):
        with losing.cursor() as cursor, pytest.raises(IntegrityError):
            cursor.executemany("INSERT OR ROLLBACK INTO u VALUES (%s)", [(2,), (1,)])
        assert not is_locked(gate_path)
        with pytest.raises(TransactionManagementError):
            execute(losing, "SELECT 1")


def test_a_script_commits_the_block_and_nothing_follows_it(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    """Python commits before a script; a statement after it would be on its own."""
    with transaction.atomic(using=connection.alias):
        execute(connection, "INSERT INTO t VALUES (1)")
        with connection.cursor() as cursor:
            cursor.executescript("INSERT INTO t VALUES (2);")
        assert not is_locked(gate_path)
        with pytest.raises(TransactionManagementError, match="has ended already"):
            execute(connection, "INSERT INTO t VALUES (3)")
    assert rows() == [1, 2]


# ---- Autocommit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO t SELECT probe()",
        "insert into t values (probe())",
        "/* note */ INSERT INTO t SELECT probe()",
        "REPLACE INTO t SELECT probe()",
        "UPDATE t SET n = probe()",
        "DELETE FROM t WHERE n = probe()",
        "WITH a AS (SELECT probe() AS n) INSERT INTO t SELECT n FROM a",
        "WITH a AS (SELECT 0 AS n) UPDATE t SET n = probe()",
        "CREATE TABLE made AS SELECT probe()",
        "INSERT INTO t VALUES (probe()) RETURNING n",
    ],
)
def test_an_autocommit_write_passes_the_gate(connection: Any, gate_path: Path, sql: str) -> None:
    execute(connection, "INSERT INTO t VALUES (0)")
    seen = probe(connection, gate_path)
    execute(connection, sql)
    assert seen
    assert all(seen)
    assert not is_locked(gate_path)


@pytest.mark.parametrize("sql", ["SELECT probe()", "WITH a AS (SELECT 1) SELECT probe()"])
def test_an_autocommit_read_does_not(connection: Any, gate_path: Path, sql: str) -> None:
    seen = probe(connection, gate_path)
    execute(connection, sql)
    assert seen == [False]


def test_executemany_and_executescript_pass_the_gate_once_for_all(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    seen = probe(connection, gate_path)
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO t SELECT probe() + %s", [(0,), (0,), (0,)])
        cursor.executescript("INSERT INTO t SELECT probe(); INSERT INTO t SELECT probe();")
    assert seen == [True] * 5
    assert rows() == [1, 2, 3, 4, 5]
    assert not is_locked(gate_path)


@pytest.mark.parametrize(
    "sql", ["VACUUM", "REINDEX", "ANALYZE", "PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA optimize"]
)
def test_maintenance_passes_the_gate(connect: Any, gate_path: Path, sql: str) -> None:
    connection = connect(timeout=0.05)
    execute(connection, "CREATE TABLE t (n)")
    with held_elsewhere(gate_path), pytest.raises(OperationalError, match="database is locked"):
        execute(connection, sql)
    execute(connection, sql)
    assert not is_locked(gate_path)


def test_a_failed_autocommit_write_lets_the_gate_go(connection: Any, gate_path: Path) -> None:
    with pytest.raises(OperationalError):
        execute(connection, "INSERT INTO missing VALUES (1)")
    assert not is_locked(gate_path)


def test_a_begin_of_ones_own_keeps_the_gate_until_its_end(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    for end, kept in (("COMMIT", [1]), ("ROLLBACK", [1])):
        execute(connection, "BEGIN")
        execute(connection, "INSERT INTO t VALUES (1)")
        assert is_locked(gate_path)
        execute(connection, end)
        assert not is_locked(gate_path)
        assert rows() == kept


# ---- RETURNING ------------------------------------------------------------------------------

RETURNING = "INSERT INTO t VALUES (1), (2), (3), (4) RETURNING n, n * 10"
RETURNED = [(1, 10), (2, 20), (3, 30), (4, 40)]


def test_returning_has_committed_before_the_gate_goes(
    connection: Any, database: Path, gate_path: Path, rows: Rows
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(RETURNING)
        assert not is_locked(gate_path)
        assert can_write(database)
        assert rows() == [1, 2, 3, 4]
        assert cursor.fetchall() == RETURNED


def test_the_rows_of_returning_can_be_fetched_in_every_way(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(RETURNING)
        assert [column[0] for column in cursor.description] == ["n", "n * 10"]
        assert cursor.rowcount == 4
        assert cursor.lastrowid == 4
        assert cursor.fetchone() == RETURNED[0]
        assert cursor.fetchmany() == [RETURNED[1]]
        assert cursor.fetchmany(1) == [RETURNED[2]]
        assert list(cursor) == [RETURNED[3]]
        assert cursor.fetchone() is None
        assert cursor.fetchmany(5) == []
        assert cursor.fetchall() == []
        cursor.execute(RETURNING)
        assert next(cursor.cursor) == RETURNED[0]
        assert list(cursor) == RETURNED[1:]
        cursor.execute("SELECT 7")
        assert cursor.fetchall() == [(7,)]


def test_the_rows_of_returning_are_gone_with_the_cursor(connection: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(RETURNING)
    cursor.close()
    with pytest.raises(DatabaseError):
        cursor.fetchone()


# ---- Manual transactions ----------------------------------------------------------------------


@pytest.mark.parametrize(("end", "kept"), [("commit", [1]), ("rollback", []), ("close", [])])
def test_without_autocommit_the_gate_is_held_from_the_first_write_to_the_end(
    connection: Any, gate_path: Path, rows: Rows, end: str, kept: list[int]
) -> None:
    connection.set_autocommit(False)
    execute(connection, "SELECT * FROM t")
    assert not is_locked(gate_path)
    execute(connection, "INSERT INTO t VALUES (1)")
    assert is_locked(gate_path)
    execute(connection, "SELECT * FROM t")
    assert is_locked(gate_path)
    getattr(connection, end)()
    assert not is_locked(gate_path)
    assert rows() == kept


def test_turning_autocommit_on_commits_and_lets_the_gate_go(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    connection.set_autocommit(False)
    execute(connection, "INSERT INTO t VALUES (1)")
    connection.set_autocommit(True)
    assert not is_locked(gate_path)
    assert rows() == [1]


def test_a_statement_that_begins_nothing_lets_the_gate_go(connection: Any, gate_path: Path) -> None:
    connection.set_autocommit(False)
    execute(connection, "CREATE TABLE made (n)")
    assert not is_locked(gate_path)
    connection.rollback()


@pytest.mark.parametrize("savepoint", [True, False])
def test_a_block_inside_a_manual_transaction_leaves_it_open(
    connection: Any, gate_path: Path, rows: Rows, savepoint: bool
) -> None:
    connection.set_autocommit(False)
    execute(connection, "INSERT INTO t VALUES (1)")
    with transaction.atomic(using=connection.alias, savepoint=savepoint):
        execute(connection, "INSERT INTO t VALUES (2)")
        assert is_locked(gate_path)
    assert is_locked(gate_path)
    assert rows() == []
    connection.commit()
    assert rows() == [1, 2]
    assert not is_locked(gate_path)


def test_a_block_alone_in_manual_mode_commits_with_its_savepoint(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    """Python begins no transaction before SAVEPOINT; releasing it commits. Django's own way."""
    connection.set_autocommit(False)
    with transaction.atomic(using=connection.alias):
        assert is_locked(gate_path)
        execute(connection, "INSERT INTO t VALUES (1)")
    assert not is_locked(gate_path)
    assert rows() == [1]


# ---- Waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["block", "statement", "many", "script"])
def test_a_wait_ends_as_a_locked_database_and_names_the_holder(
    connect: Any, connection: Any, gate_path: Path, how: str
) -> None:
    impatient = connect(timeout=0.05)
    impatient.ensure_connection()
    cursor = impatient.cursor()
    ways = {
        "block": transaction.atomic(using=impatient.alias).__enter__,
        "statement": lambda: cursor.execute("INSERT INTO t VALUES (1)"),
        "many": lambda: cursor.executemany("INSERT INTO t VALUES (%s)", [(1,)]),
        "script": lambda: cursor.executescript("INSERT INTO t VALUES (1)"),
    }
    error: Any = sqlite3.OperationalError if how == "script" else OperationalError
    with held_elsewhere(gate_path, "PID 0.0 nightly import") as other:
        with pytest.raises(error) as raised:
            ways[how]()
        assert execute(impatient, "SELECT * FROM t") == []
    assert str(raised.value).startswith("database is locked")
    assert f"process {other.pid} (thread nightly import)" in str(raised.value)
    original = raised.value if how == "script" else raised.value.__cause__
    assert original.sqlite_errorcode == sqlite3.SQLITE_BUSY
    execute(impatient, "INSERT INTO t VALUES (1)")


def test_threads_with_connections_of_their_own_all_get_their_turn(
    connection: Any, gate_path: Path, rows: Rows
) -> None:
    def write(number: int) -> None:
        mine = connections[connection.alias]
        try:
            for _ in range(10):
                with transaction.atomic(using=connection.alias):
                    execute(mine, "INSERT INTO t VALUES (%s)", [number])
        finally:
            mine.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rows()) == sorted(list(range(8)) * 10)
    assert not is_locked(gate_path)


def test_two_aliases_of_one_file_in_one_thread_fail_as_with_sqlite_alone(
    connect: Any, connection: Any, gate_path: Path
) -> None:
    other = connect(timeout=0.01)
    with transaction.atomic(using=connection.alias):
        with pytest.raises(OperationalError, match="locked"), transaction.atomic(using=other.alias):
            pass
        assert is_locked(gate_path)
    with transaction.atomic(using=other.alias):
        pass
    assert not is_locked(gate_path)


def test_a_permit_taken_by_the_caller_is_nested_in(
    connection: Any, database: Path, gate_path: Path
) -> None:
    with gate_for(database).acquire(1):
        with transaction.atomic(using=connection.alias):
            execute(connection, "INSERT INTO t VALUES (1)")
        execute(connection, "INSERT INTO t VALUES (2)")
        assert is_locked(gate_path)
    assert not is_locked(gate_path)


# ---- Which gate -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["relay_queue.db.sqlite3", DJANGOS_ENGINE])
def test_the_gate_of_a_connection_is_that_of_its_file(
    connect: Any, database: Path, engine: str
) -> None:
    gate = gate_for(database)
    for name in (
        database,
        str(database),
        f"file:{database}",
        f"file://{database}?cache=shared",
        f"file://localhost{database}#x",
        f"file:{str(database).replace('scratch', 's%63ratch')}?mode=rw",
    ):
        assert gate_of(connect(name=name, engine=engine)) is gate


@pytest.mark.parametrize("engine", ["relay_queue.db.sqlite3", DJANGOS_ENGINE])
@pytest.mark.parametrize(
    "name",
    [
        ":memory:",
        "file::memory:?cache=shared",
        "file:memorydb_default?mode=memory&cache=shared",
        "file:/x?vfs=memdb",
        "",
    ],
)
def test_a_database_in_memory_has_no_gate(connect: Any, engine: str, name: str) -> None:
    assert gate_of(connect(name=name, engine=engine)) is None


def test_other_vendors_have_no_gate() -> None:
    class Other:
        vendor = "postgresql"

    assert gate_of(Other()) is None


@pytest.mark.parametrize("name", [":memory:", "file:gate_test?mode=memory&cache=shared"])
def test_a_database_in_memory_works_as_ever(
    connect: Any, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    connection = connect(name=name)
    execute(connection, "CREATE TABLE t (n)")
    with transaction.atomic(using=connection.alias):
        assert connection.permit is UNGATED
        execute(connection, "INSERT INTO t VALUES (1)")
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=connection.alias):  # noqa: PT012
        execute(connection, "INSERT INTO t VALUES (2)")
        raise ZeroDivisionError
    assert execute(connection, "INSERT INTO t VALUES (3) RETURNING n") == [(3,)]
    assert execute(connection, "SELECT n FROM t") == [(1,), (3,)]
    connection.connection.close()
    connection.connection = None
    assert list(tmp_path.iterdir()) == []
