"""The search of a list: a word, or a prefix that says what the word is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Q
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from relay_queue.admin.lists import folding
from relay_queue.admin.lists.criteria import Criteria

MOST_ID_DIGITS: Final = 18

PREFIXES: Final = ("id", "task", "queue", "key", "error")
SECRET: Final = frozenset({"key", "error"})
"""The kinds that look into what callers and functions wrote, which not everybody may view."""

HELP: Final = _(
    "A number finds a job by its id, anything else the tasks that begin so. Or say what it is: "
    "id: task: queue: key: error:"
)


@dataclass(frozen=True, slots=True)
class Term:
    """What a search means: the kind of word, the word, and what is wrong with it if anything is."""

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
                return folding.contains("last_error", self.word)

    def tell(self, asked: Criteria) -> None:
        """Add the search to what is asked for."""
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
    """Read what was typed; nothing is no search. A fault finds no job and says why.

    ``kinds`` are the prefixes that the list knows. Without ``secrets``, those of `SECRET` are
    refused: what a search finds tells of a text, letter by letter, as well as showing it.
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
