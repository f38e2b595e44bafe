"""Tables that refuse: how an engine is told to refuse what is done with rows, and to forget it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.store.actions import connection

REFUSE = {
    "sqlite": [
        """
        CREATE TRIGGER refuse BEFORE {what} ON {table} WHEN {condition}
        BEGIN SELECT RAISE(ABORT, 'not this one'); END"""
    ],
    "postgresql": [
        """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'not this one'; END $$""",
        """
        CREATE TRIGGER refuse BEFORE {what} ON {table}
        FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()""",
    ],
}
ALWAYS = {"sqlite": "1", "postgresql": "TRUE"}
FORGET = {"sqlite": "DROP TRIGGER refuse", "postgresql": "DROP FUNCTION refuse CASCADE"}


def refuse(what: str, table: str, condition: str = "") -> None:
    """Let a table refuse some rows, or all: ``what`` is INSERT or UPDATE."""
    condition = condition or ALWAYS[connection().vendor]
    with connection().cursor() as cursor:
        for statement in REFUSE[connection().vendor]:
            cursor.execute(statement.format(what=what, table=table, condition=condition))


def forget() -> None:
    """Let the table take everything again."""
    with connection().cursor() as cursor:
        cursor.execute(FORGET[connection().vendor])


@contextmanager
def refusing(what: str, table: str, condition: str = "") -> Iterator[None]:
    """Let a table refuse rows for as long as the block lasts."""
    refuse(what, table, condition)
    try:
        yield
    finally:
        forget()
