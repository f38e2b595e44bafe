"""How PostgreSQL stores the tables: room for updates in place, and early vacuums."""

from __future__ import annotations

import pytest

from relay_queue import store
from relay_queue.store.dialects import dialect_for
from relay_queue.store.dialects.postgresql import STORAGE
from tests.store.actions import claim, connection, do, enqueue, enqueue_each

pytestmark = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)


def options(table: str) -> list[str]:
    with connection().cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE relname = %s", [table])
        return list(cursor.fetchone()[0])


@pytest.mark.parametrize("table", STORAGE)
def test_migrate_sets_how_each_hot_table_is_stored(engine: str, table: str) -> None:
    assert options(table) == [part.replace(" ", "") for part in STORAGE[table].split(", ")]


def test_migrate_leaves_alone_what_somebody_has_set(engine: str) -> None:
    with connection().cursor() as cursor:
        cursor.execute("ALTER TABLE relay_queue_queuecount RESET (fillfactor)")
        before = options("relay_queue_queuecount")
        dialect_for(connection()).tune(connection())
        assert options("relay_queue_queuecount") == before
        cursor.execute("ALTER TABLE relay_queue_queuecount SET (fillfactor = 40)")


def test_counters_are_updated_in_place(engine: str) -> None:
    enqueue()
    in_place, all_of_them = updates()
    enqueue_each(50)
    for held in claim(50):
        do(store.ack, held.lease_id, held.token)
    now_in_place, now_all = updates()
    assert now_all - all_of_them >= 100
    assert now_in_place - in_place >= 0.9 * (now_all - all_of_them)


def updates() -> tuple[int, int]:
    """Return how many updates of counters were in place, and how many there were."""
    with connection().cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables "
            "WHERE relname = 'relay_queue_queuecount'"
        )
        in_place, all_of_them = cursor.fetchone()
        return in_place, all_of_them
