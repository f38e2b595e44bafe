"""The cursor that keeps a worker's statements prepared, and sends several at once."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import psycopg
import pytest

from relay_queue.store.dialects import pg_cursor
from relay_queue.store.dialects.pg_cursor import PreparedCursor, array, numbered
from relay_queue.store.dialects.postgresql import BEGIN_AS_WORKER, PostgreSQLDialect
from tests import postgresql
from tests.store.actions import connection

# Not by name: the package has verbs of these names.
claiming = import_module("relay_queue.store.claim")
settling = import_module("relay_queue.store.settle")
granting = import_module("relay_queue.store.grant")

pytestmark = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)

Open = Callable[..., PreparedCursor]


@pytest.fixture
def opened(engine: str) -> Iterator[Open]:
    """Return what opens a cursor on a connection of its own; nothing that it does is committed."""
    lines: list[psycopg.Connection[Any]] = []

    def open_one(*, pooled: bool = False, **options: Any) -> PreparedCursor:
        params = connection().get_connection_params()
        wanted = {"host": params["host"], "port": params["port"], "user": params["user"]}
        line = psycopg.connect(dbname=params["dbname"], **wanted, prepare_threshold=None, **options)
        lines.append(line)
        return PreparedCursor(line, pooled=pooled)

    yield open_one
    for line in lines:
        line.close()


def one(cursor: PreparedCursor, statement: str, *params: Any) -> Any:
    cursor.execute(statement, params)
    row = cursor.fetchone()
    assert row is not None
    return row[0]


def kept(cursor: PreparedCursor) -> int:
    return int(one(cursor, "SELECT count(*) FROM pg_prepared_statements WHERE $1", True))


@pytest.mark.parametrize(
    ("cast", "value"),
    [
        ("bigint", 2**62),
        ("bigint", None),
        ("float8", 0.1),
        ("bool", True),
        ("text", 'it\'s \\ "quoted", {braced}, NULL and ünïcode\n'),
        ("text", ""),
        ("timestamptz", datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)),
    ],
)
def test_values_come_back_as_they_were_sent_alone_and_in_arrays(
    opened: Open, cast: str, value: object
) -> None:
    cursor = opened()
    assert one(cursor, f"SELECT $1::{cast}", value) == value
    assert one(cursor, f"SELECT $1::{cast}[]", array([value, None], cast)) == [value, None]
    assert one(cursor, f"SELECT $1::{cast}[]", [value]) == [value]


@pytest.mark.parametrize(("value", "error"), [("a\0b", "DataError"), (b"raw", "ProgrammingError")])
def test_a_value_that_no_column_holds_is_refused_before_it_is_sent(
    opened: Open, value: object, error: str
) -> None:
    cursor = opened()
    with pytest.raises(getattr(psycopg.errors, error)):
        cursor.execute("SELECT $1::text", [value])
    assert one(cursor, "SELECT $1::int", 1) == 1


def test_a_statement_is_prepared_once_whatever_its_values_are(opened: Open) -> None:
    cursor = opened()
    for number in range(3):
        assert one(cursor, "SELECT $1 + 1", number) == number + 1
    assert kept(cursor) == 2


@pytest.mark.parametrize("options", [{"pooled": True}, {"prepare_threshold": 5}])
def test_nothing_stays_prepared_where_it_could_be_lost(
    opened: Open, options: dict[str, Any]
) -> None:
    threshold = options.pop("prepare_threshold", None)
    cursor = opened(**options)
    cursor.connection.prepare_threshold = threshold
    cursor = PreparedCursor(cursor.connection, pooled=bool(options))
    assert one(cursor, "SELECT $1 + 1", 1) == 2
    assert kept(cursor) == 0


def test_a_connection_keeps_only_so_many_statements(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_cursor, "MOST_PREPARED", 5)
    cursor = opened()
    for number in range(20):
        assert one(cursor, f"SELECT $1 + {number}", 1) == 1 + number
        assert kept(cursor) <= 6


def test_what_was_posted_goes_before_the_next_statement(opened: Open) -> None:
    cursor = opened()
    cursor.post("SELECT set_config('relay.test', $1, true)", ["first"])
    assert one(cursor, "SELECT current_setting('relay.test')") == "first"


def test_an_error_of_what_was_posted_is_raised_by_the_next_statement(opened: Open) -> None:
    cursor = opened()
    cursor.post("SELECT 1 / $1::int", [0])
    with pytest.raises(psycopg.errors.DivisionByZero):
        cursor.execute("SELECT $1::int", [1])
    cursor.connection.rollback()
    assert one(cursor, "SELECT $1::int", 2) == 2


def test_what_was_posted_for_a_transaction_that_is_undone_is_never_sent(opened: Open) -> None:
    cursor = opened()
    cursor.post("SELECT 1 / $1::int", [0])
    cursor.forget()
    assert one(cursor, "SELECT $1::int", 3) == 3


def test_an_answer_that_is_kept_is_there_when_it_is_asked_for_and_only_once(opened: Open) -> None:
    cursor = opened()
    cursor.post("SELECT $1::int", [1], keep=True)
    cursor.post("SELECT $1::int", [2])
    assert one(cursor, "SELECT $1::int", 3) == 3
    assert cursor.kept() == (1,)
    assert cursor.kept() is None


def test_a_statement_whose_answer_is_asked_for_is_sent_for_it(opened: Open) -> None:
    cursor = opened()
    cursor.post("SELECT $1::int", [1], keep=True)
    assert cursor.kept() == (1,)
    cursor.post("SELECT set_config('relay.test', $1, true)", ["sent"])
    cursor.send()
    assert cursor.connection.execute("SELECT current_setting('relay.test')").fetchone() == ("sent",)


@pytest.mark.parametrize("sent", [True, False])
def test_an_answer_of_a_transaction_that_is_undone_is_not_kept(opened: Open, sent: bool) -> None:
    cursor = opened()
    cursor.post("SELECT $1::int", [1], keep=True)
    if sent:
        cursor.send()
    cursor.forget()
    assert cursor.kept() is None


def test_many_rows_of_values_and_large_ones_pass_at_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_cursor, "EXCHANGED_AT_ONCE", 7)
    cursor = opened()
    rows = [(number, "x" * 300_000) for number in range(20)]
    answers = list(cursor.execute_each("SELECT $1, $2::text", rows))
    assert answers == rows


def test_large_rows_are_exchanged_by_fewer_at_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_cursor, "EXCHANGED_BYTES", 1_000)
    cursor = opened()
    exchange, sizes = cursor._exchange, []

    def counted(messages: list[Any]) -> Any:
        sizes.append(len(messages))
        return exchange(messages)

    monkeypatch.setattr(cursor, "_exchange", counted)
    rows = [(number, "x" * length) for number, length in enumerate([1] * 10 + [400] * 7)]
    assert list(cursor.execute_each("SELECT $1, $2::text", rows)) == rows
    assert sizes == [13, 3, 1]


def test_it_begins_the_transaction_that_the_connection_wants(opened: Open) -> None:
    cursor = opened()
    cursor.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert one(cursor, "SELECT current_setting('transaction_isolation')") == "repeatable read"
    assert cursor.connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def test_a_connection_that_was_ended_is_an_operational_error(opened: Open) -> None:
    cursor = opened()
    pid = cursor.connection.info.backend_pid
    with connection().cursor() as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    for _ in range(2):  # when it is found out, and from then on
        with pytest.raises(psycopg.OperationalError):
            cursor.execute("SELECT $1::int", [1])
    assert cursor.connection.closed


STATEMENTS = {
    "end and succeed": (settling.END_AND_SUCCEED, settling.CHAIN_CASTS, 2),
    "start and grant": (granting.START_AND_GRANT, granting.GRANT_CASTS, 1),
    "move": (settling.MOVE, settling.MOVE_CASTS, 1),
    "renew": (settling.RENEW, settling.RENEW_CASTS, 1),
}
"""Statements that change rows by id: their types, and how many tables they look into."""

LOOKUPS = {settling.MOVE: settling.MOVE_LOOKUP, settling.RENEW: settling.RENEW_LOOKUP}


@pytest.fixture(scope="module")
def small_tables(postgresql_server: postgresql.Server) -> Iterator[dict[str, str]]:
    """Return databases of their own whose tables a planner takes for empty, each for its reason."""
    names = {state: f"small_{uuid.uuid4().hex}" for state in EMPTIED}
    urls = {state: postgresql_server.create(name) for state, name in names.items()}
    for state, url in urls.items():
        with psycopg.connect(url, autocommit=True) as line:
            for command in EMPTIED[state]:
                line.execute(command)
    yield urls
    for name in names.values():
        postgresql_server.drop(name)


def fill(rows: int) -> list[str]:
    """Return the commands that fill a table of jobs and empty it again, all but one."""
    return [
        (
            "INSERT INTO relay_queue_job (queue, backend, task, payload, checksum, priority, rank, state,"
            " attempt, attempt_base, max_attempts, lease_seconds, backoff_base_seconds,"
            " backoff_max_seconds, backoff_jitter, losses, available_at, created_at, last_error)"
            " SELECT 'default', 'default', 'a.task', '[]', 0, 0, n, 'ready', 0, 0, 1, 60, 1, 1, 'none',"
            f" 0, now(), now(), '' FROM generate_series(1, {rows}) AS n"
        ),
        "DELETE FROM relay_queue_job WHERE rank > 1",
        "VACUUM ANALYZE relay_queue_job",
    ]


EMPTIED = {
    "new": [],
    "looked at while empty": ["ANALYZE relay_queue_job", "ANALYZE relay_queue_lease"],
    "emptied": fill(300),
    "emptied of many": fill(10_000),
}


@pytest.mark.parametrize("state", EMPTIED)
@pytest.mark.parametrize("verb", STATEMENTS)
def test_a_plan_made_while_tables_were_small_looks_rows_up_by_id(
    engine: str, small_tables: dict[str, str], state: str, verb: str
) -> None:
    statement, casts, lookups = STATEMENTS[verb]
    if statement in LOOKUPS:
        lookup = PostgreSQLDialect().lookup(*LOOKUPS[statement])
        statement = statement.replace("{lookup}", lookup)
    plan = plan_of(small_tables[state], statement, casts)
    scans = scans_of(plan)
    assert len(scans) == lookups, "\n".join(plan)
    for scan, condition in scans:
        assert "_pkey on" in scan, "\n".join(plan)
        assert "Index Cond: (id = ANY" in condition, "\n".join(plan)


@pytest.mark.parametrize("state", EMPTIED)
def test_a_claim_planned_while_tables_were_small_changes_jobs_where_it_found_them(
    engine: str, small_tables: dict[str, str], state: str
) -> None:
    pick = claiming.PICK.format(
        columns="ctid AS place, losses",
        condition=claiming.STILL_UNLIMITED,
        lock=PostgreSQLDialect.skip_locked,
    )
    plan = plan_of(small_tables[state], granting.PICK_START_AND_GRANT.replace("{pick}", pick), ())
    (search, found), (change, place) = scans_of(plan, "relay_queue_job")
    assert "relay_job_ready on" in search, "\n".join(plan)
    assert "Index Cond: ((queue)::text = " in found, "\n".join(plan)
    assert ("Tid Scan" in change, place.endswith(".place)")) == (True, True), "\n".join(plan)


def plan_of(url: str, statement: str, casts: tuple[str, ...]) -> list[str]:
    """Return how the server would run a statement that it has planned for any values."""
    dialect = PostgreSQLDialect()
    statement = statement.format(rows=dialect.rows(1, casts), clock=dialect.clock)
    with psycopg.connect(url, prepare_threshold=None) as line:
        cursor = PreparedCursor(line, pooled=False)
        cursor.execute(numbered(BEGIN_AS_WORKER), ["1s"])
        cursor.execute(f"PREPARE once AS {numbered(statement)}")
        nulls = ", ".join(["NULL"] * numbered(statement).count("$"))
        cursor.execute(f"EXPLAIN EXECUTE once({nulls})")
        return [line for (line,) in cursor.fetchall()]


def scans_of(plan: list[str], table: str = "relay_queue_") -> list[tuple[str, str]]:
    """Return the lines that say how a table is looked through, each with the one below it."""
    return [
        (line, below)
        for line, below in itertools.pairwise(plan)
        if "Scan" in line and f" on {table}" in line
    ]
