"""Arguments and results as people may read them: laid out, cut to a length, and redacted."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from django.utils.translation import gettext as _

from relay_queue import conf

MOST_SHOWN_CHARS: Final = 20_000


def arguments(task: str, payload: str) -> str:
    """Return the arguments of a job as text, without the values that ``RELAY["REDACT"]`` names.

    A name hides a keyword argument, a positional one whose parameter has that name, and a key of a
    dictionary at any depth.
    """
    return _laid_out(payload, task)


def result(text: str | None) -> str:
    """Return what a function returned as text, redacted likewise; nothing if there is no result."""
    return "" if text is None else _laid_out(text)


def _laid_out(text: str, task: str = "") -> str:
    names = frozenset(conf.get().redact)
    try:
        value = json.loads(text)
        if names and task:
            value = _without_positional(value, names, task)
        shown = json.dumps(_redacted(value, names), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):  # altered on disk: shown as it is, if nothing is secret
        shown = text if not names else _("(not readable, so not shown: RELAY['REDACT'] is set)")
    if len(shown) > MOST_SHOWN_CHARS:
        more = len(shown) - MOST_SHOWN_CHARS
        shown = f"{shown[:MOST_SHOWN_CHARS]}\n… {_('%(n)s more characters') % {'n': f'{more:,}'}}"
    return shown


def _without_positional(value: Any, names: frozenset[str], task: str) -> Any:
    """Hide positional arguments by the names of their parameters.

    Where those cannot be known, because the task's module is not loaded here, all are hidden: one
    of them may be the secret.
    """
    if not isinstance(value, dict) or not isinstance(value.get("args"), list) or not value["args"]:
        return value
    parameters = _parameters(task)
    shown = [
        _hidden() if _may_be_named(parameters, place, names) else item
        for place, item in enumerate(value["args"])
    ]
    return {**value, "args": shown}


def _may_be_named(
    parameters: Sequence[inspect.Parameter] | None, place: int, names: frozenset[str]
) -> bool:
    """Say whether the argument at a place may have one of the names.

    It may if no parameter takes it: the function had others when the job was enqueued.
    """
    if parameters is None:
        return True
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        place = min(place, len(parameters) - 1)  # ``*args`` takes all the others
    return place >= len(parameters) or parameters[place].name in names


def _parameters(task: str) -> list[inspect.Parameter] | None:
    """Return the positional parameters of a task whose module is loaded; nothing is imported."""
    module, _dot, name = task.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    function = getattr(found, "func", None)
    if not callable(function):
        return None
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None
    if getattr(found, "takes_context", False):
        parameters = parameters[1:]
    return [p for p in parameters if p.kind not in {p.KEYWORD_ONLY, p.VAR_KEYWORD}]


def _redacted(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: _hidden() if key in names else _redacted(item, names)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item, names) for item in value]
    return value


def _hidden() -> str:
    return _("(hidden)")
