"""Folding: texts without regard to case, in any script and on either database.

SQLite's own functions know the letters of ASCII alone, and those of PostgreSQL what the locale of the
database knows, which may be as little.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from django.db import connections
from django.db.models import CharField, Func, Q, TextField, Value
from django.db.models.functions import Cast, StrIndex
from django.db.models.lookups import GreaterThan

SQLITE_FUNCTION: Final = "RELAY_UPPER"
ICU: Final = "und-x-icu"

HAS_ICU: Final = """
    SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_collation
                   WHERE collname = %s AND collencoding IN (-1, 6) AND getdatabaseencoding() = 'UTF8')
"""
"""Say whether the server was built with the rules of Unicode, as all packaged ones are."""


class Upper(Func):
    """A text in upper case, by the rules of Unicode."""

    function = "UPPER"
    arity = 1
    output_field = CharField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Ask Python, by a function that lives as long as the connection."""
        connection.ensure_connection()
        connection.connection.create_function(SQLITE_FUNCTION, 1, _upper, deterministic=True)
        return self.as_sql(compiler, connection, function=SQLITE_FUNCTION, **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Name the collation; without ICU, the locale of the database must do."""
        if _has_icu(connection.alias, str(connection.settings_dict)):
            context["template"] = f'%(function)s(%(expressions)s COLLATE pg_catalog."{ICU}")'
        return self.as_sql(compiler, connection, **context)


def contains(column: str, word: str) -> Q:
    """Return the condition that a column contains a word, in whatever case."""
    sought = Upper(Cast(Value(word), TextField()))
    return Q(GreaterThan(StrIndex(Upper(column), sought), 0))


def _upper(text: str | None) -> str | None:
    return None if text is None else text.upper()


@lru_cache
def _has_icu(alias: str, settings: str) -> bool:
    with connections[alias].cursor() as cursor:
        cursor.execute(HAS_ICU, [ICU])
        return bool(cursor.fetchone()[0])
