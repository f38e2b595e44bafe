"""Tables that refuse: how an engine is told to refuse what is done with rows, and to forget it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.store.actions import connection

REFUSE = {
    "sqlite": [
        """
        CREATE TRIGGER {name} BEFORE {what} ON {table} WHEN {condition}
        BEGIN SELECT RAISE(ABORT, 'not this one'); END"""
    ],
    "postgresql": [
        """
        CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'not this one'; END $$""",
        """
        CREATE TRIGGER {name} BEFORE {what} ON {table}
        FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION {name}()""",
    ],
}
ALWAYS = {"sqlite": "1", "postgresql": "TRUE"}
FORGET = {"sqlite": "DROP TRIGGER {name}", "postgresql": "DROP FUNCTION {name} CASCADE"}


def _name(what: str, table: str) -> str:
    return f"refuse_{what}_{table}".lower()


def refuse(what: str, table: str, condition: str = "") -> None:
    """Let a table refuse some rows, or all: ``what`` is INSERT or UPDATE."""
    condition = condition or ALWAYS[connection().vendor]
    name = _name(what, table)
    with connection().cursor() as cursor:
        for statement in REFUSE[connection().vendor]:
            cursor.execute(statement.format(name=name, what=what, table=table, condition=condition))


def forget(what: str, table: str) -> None:
    """Let a table take this again."""
    with connection().cursor() as cursor:
        cursor.execute(FORGET[connection().vendor].format(name=_name(what, table)))


@contextmanager
def refusing(what: str, table: str, condition: str = "") -> Iterator[None]:
    """Let a table refuse rows for as long as the block lasts."""
    refuse(what, table, condition)
    try:
        yield
    finally:
        forget(what, table)
