"""A condition for constraints: a column has one of a few values."""

from __future__ import annotations

from typing import Any

from django.db.models import BooleanField, Func


class OneOf(Func):
    """Whether a text has one of these values, asked in the way that costs each engine least.

    PostgreSQL parses the text of a constraint for each statement that writes, so it must be short:
    one array. SQLite would build a table of the values for each row, so it compares them one by
    one. ``values`` are plain words with spaces between: ``OneOf("state", values="new old")``.
    """

    output_field = BooleanField()
    arity = 1

    def as_sql(
        self, compiler: Any, connection: Any, *_: Any, **__: Any
    ) -> tuple[str, tuple[Any, ...]]:
        """Compare one by one."""
        column, params = compiler.compile(self.source_expressions[0])
        words = self.extra["values"].split()
        return f"({' OR '.join([f'{column} = %s'] * len(words))})", (*params, *words)

    def as_postgresql(
        self, compiler: Any, connection: Any, **_: Any
    ) -> tuple[str, tuple[Any, ...]]:
        """Compare with an array."""
        column, params = compiler.compile(self.source_expressions[0])
        return f"{column} = ANY (%s)", (*params, f"{{{','.join(self.extra['values'].split())}}}")
