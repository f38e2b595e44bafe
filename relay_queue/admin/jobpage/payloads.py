"""Arguments and results as people may read them: redacted, laid out, and cut to a length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.admin import texts
from relay_queue.admin.redacting import Redactor

MOST_SHOWN_CHARS: Final = 20_000
_INDENT: Final = "  "


def arguments(task: str, payload: str) -> str:
    """Return the arguments of a job as text, without the values that ``RELAY["REDACT"]`` names."""
    return _shown(texts.ARGUMENTS, task, payload)


def result(task: str, text: str | None) -> str:
    """Return what a function returned as text, redacted likewise; nothing if there is no result."""
    return "" if text is None else _shown(texts.RESULT, task, text)


def _shown(kind: str, task: str, text: str) -> str:
    redactor = Redactor(conf.get().redact)
    try:
        value = json.loads(text)
        if kind == texts.ARGUMENTS:
            value = redactor.arguments(task, value)
        if conf.get().formatter is not None:
            return _cut([texts.formatted(kind, task, redactor.all(value))])
        return _cut(pieces(value, redactor))
    except (ValueError, RecursionError):  # altered on disk: shown as it is, if nothing is secret
        if redactor or conf.get().formatter is not None:
            return _("(not readable, so not shown: RELAY['REDACT'] or ['FORMATTER'] is set)")
        return _cut([text])


def _cut(found: Iterator[str] | list[str]) -> str:
    """Join pieces up to the limit. What lies behind it is never laid out, however long it is."""
    shown: list[str] = []
    room = MOST_SHOWN_CHARS
    for piece in found:
        if len(piece) > room:
            end = _("cut here: only %(n)s characters are shown") % {"n": f"{MOST_SHOWN_CHARS:,}"}
            return "".join([*shown, piece[:room], f"\n… {end}"])
        shown.append(piece)
        room -= len(piece)
    return "".join(shown)


def pieces(value: Any, redactor: Redactor, margin: str = "\n") -> Iterator[str]:
    """Yield a value of JSON as text, laid out over lines, and redacted as it goes.

    ``margin`` is a line's end and the indent of what closes the value.
    """
    if isinstance(value, dict) and value:
        items = ((f"{_scalar(key, None)}: ", key, item) for key, item in value.items())
        yield from _container("{}", items, redactor, margin)
    elif isinstance(value, list) and value:
        yield from _container("[]", (("", None, item) for item in value), redactor, margin)
    else:
        yield _scalar(value, redactor)


def _container(
    brackets: str, items: Iterator[tuple[str, Any, Any]], redactor: Redactor, margin: str
) -> Iterator[str]:
    inner = margin + _INDENT
    begin = brackets[0]
    for label, key, item in items:
        yield begin + inner + label
        shown = redactor.word if key is not None and redactor.hides(key) else item
        yield from pieces(shown, redactor, inner)
        begin = ","
    yield margin + brackets[1]


def _scalar(value: Any, redactor: Redactor | None) -> str:
    if isinstance(value, str) and redactor:
        value = redactor.text(value)
    return json.dumps(value, ensure_ascii=False)
