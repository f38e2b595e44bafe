"""The search of a list: a word, or a prefix that names the kind of the word.

Texts are found without regard to case, in any script and on either database. SQLite's own functions
know the letters of ASCII alone. Those of PostgreSQL know the letters of the database's locale,
which may be as few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from django.db import connections
from django.db.models import CharField, Func, Q, TextField, Value
from django.db.models.functions import Cast, StrIndex
from django.db.models.lookups import GreaterThan
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from relay_queue.query.list_plans import Criteria

SQLITE_FUNCTION: Final = "RELAY_UPPER"
ICU: Final = "und-x-icu"

HAS_ICU: Final = """
    SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_collation
                   WHERE collname = %s AND collencoding IN (-1, 6) AND getdatabaseencoding() = 'UTF8')
"""
"""Check whether the server was built with ICU, the rules of Unicode, as all packaged ones are."""

MOST_ID_DIGITS: Final = 18

PREFIXES: Final = ("id", "task", "queue", "key", "error")
SECRET: Final = frozenset({"key", "error"})
"""The kinds that search texts of callers and functions, which not everybody may view."""

HELP: Final = _(
    "A number finds a job by its id, anything else the tasks that begin so. Or say what it is: "
    "id: task: queue: key: error:"
)


@dataclass(frozen=True, slots=True)
class Term:
    """A parsed search: the kind of the word, the word, and what is wrong with it, if anything."""

    kind: str
    word: str
    fault: Any = ""

    @property
    def condition(self) -> Q:
        """The condition on jobs."""
        match self.kind:
            case "id":
                return Q(pk=as_id(self.word))
            case "task":
                return Q(task__startswith=self.word)
            case "queue":
                return Q(queue=self.word)
            case "key":
                return Q(idempotency_key=self.word)
            case _:
                return contains("last_error", self.word)

    def add_to(self, asked: Criteria) -> None:
        """Add the search to the criteria."""
        match self.kind:
            case "id":
                asked.ids = [int(self.word)]
            case "task" if not asked.task:
                asked.task_prefix = self.word
            case "queue" if asked.queue in {"", self.word}:
                asked.queue = self.word
            case "key":
                asked.key = self.word
            case "error":
                asked.error = self.word
            case _:
                asked.others.add("search")


def parse(text: str, kinds: Sequence[str] = PREFIXES, *, secrets: bool = True) -> Term | None:
    """Parse the text of a search; None for an empty one. A fault finds no job and says why.

    ``kinds`` are the prefixes that the list knows. Without ``secrets``, those of `SECRET` are
    refused: by its results, a search reveals a text letter by letter.
    """
    text = text.strip().replace("\0", "")
    if not text:
        return None
    kind, colon, word = text.partition(":")
    kind, word = kind.strip().lower(), word.strip()
    if not colon:
        bare = "id" if as_id(text) is not None or "task" not in kinds else "task"
        kind, word = bare, text
    if kind not in kinds:
        return Term("", text, _unknown(kind, kinds))
    if kind in SECRET and not secrets:
        return Term("", text, format_lazy(_("You may not search by “{kind}:”."), kind=kind))
    if not word:
        return Term("", text, format_lazy(_("Write something after “{kind}:”."), kind=kind))
    if kind == "id" and as_id(word) is None:
        return Term("", text, format_lazy(_("“{word}” is not the id of a job."), word=word))
    return Term(kind, word)


def as_id(term: str) -> int | None:
    """Return the id that a search term spells, or None if it is no id."""
    term = term.strip()
    is_id = term.isascii() and term.isdigit() and len(term) <= MOST_ID_DIGITS
    return int(term) if is_id else None


def _unknown(kind: str, kinds: Sequence[str]) -> Any:
    known = " ".join(f"{prefix}:" for prefix in kinds)
    return format_lazy(
        _("“{kind}:” is not a kind of search. The kinds are {known}"), kind=kind[:40], known=known
    )


class Upper(Func):
    """A text in upper case, by the rules of Unicode."""

    function = "UPPER"
    arity = 1
    output_field = CharField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Call Python, by a function that exists as long as the connection."""
        connection.ensure_connection()
        connection.connection.create_function(SQLITE_FUNCTION, 1, _upper, deterministic=True)
        return self.as_sql(compiler, connection, function=SQLITE_FUNCTION, **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Name the collation of ICU; without ICU the locale of the database decides."""
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
