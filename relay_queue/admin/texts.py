"""Texts that callers and functions wrote, as a viewer may see them: arguments, results, errors.

A viewer who may not see arguments may see neither messages of errors nor tracebacks, which often
quote an argument. The class of an exception is a name in the code and is shown with the attempt.
Arguments and results are redacted, laid out over lines, and cut to a length.

Redacting hides the values of the names in ``RELAY["REDACT"]``, at any depth. A name is that of a
keyword argument, of the parameter of a positional one, or a key of a dictionary, also in texts that
contain JSON. Case and the choice of ``-`` or ``_`` do not matter.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.models import Job, Lease

ARGUMENTS: Final = "arguments"
RESULT: Final = "result"
ERROR: Final = "error"
TRACEBACK: Final = "traceback"
MOST_SHOWN_CHARS: Final = 20_000
_INDENT: Final = "  "

MOST_LAYERS: Final = 50
"""Wrappers of a function that are unwrapped; more are taken for a circle."""

MOST_TEXTS_IN_TEXTS: Final = 5
"""How deep texts of JSON inside of texts of JSON are parsed; a deeper one is hidden."""


def last_error(job: Job, newest: Any | None, *, may_see: bool) -> str:
    """Return the last error of a job; the class alone for those who may not see its message.

    ``newest`` is the lease that has the class, None if the viewer may not see it.
    """
    if not job.last_error:
        return ""
    if may_see:
        return formatted(ERROR, job.task, job.last_error)
    path = "" if newest is None else str(newest.error)
    return path.rpartition(".")[2] or hidden()


def traceback(lease: Lease, *, may_see: bool) -> str:
    """Return the traceback of an attempt; nothing if there is none."""
    if not lease.traceback:
        return ""
    return formatted(TRACEBACK, lease.job.task, lease.traceback) if may_see else hidden()


def formatted(kind: str, task: str, value: Any) -> str:
    """Return a value as the project's own formatter shows it; without one, the value, a text.

    An error of the formatter is shown in place of the value, by its class alone. Its message may
    contain what the formatter hides.
    """
    path = conf.get().formatter
    if path is None:
        return str(value)
    try:
        shown = import_string(path)(kind, task, value)
        if not isinstance(shown, str):
            raise TypeError
    except Exception as error:  # noqa: BLE001 - code of the project must not break a page
        name = type(error).__name__
        return _("(not shown: RELAY['FORMATTER'], %(path)s, raised %(name)s)") % {
            "path": path,
            "name": name,
        }
    return shown


def arguments(task: str, payload: str) -> str:
    """Return the arguments of a job as text, without the values that ``RELAY["REDACT"]`` names."""
    return _shown(ARGUMENTS, task, payload)


def result(task: str, text: str | None) -> str:
    """Return the result of a job as text, redacted like arguments; empty if there is no result."""
    return "" if text is None else _shown(RESULT, task, text)


def _shown(kind: str, task: str, text: str) -> str:
    redactor = Redactor(conf.get().redact)
    try:
        value = json.loads(text)
        if kind == ARGUMENTS:
            value = redactor.arguments(task, value)
        if conf.get().formatter is not None:
            return _cut([formatted(kind, task, redactor.all(value))])
        return _cut(pieces(value, redactor))
    except (ValueError, RecursionError):  # altered on disk: shown unchanged, if nothing is secret
        if redactor or conf.get().formatter is not None:
            return _("(not readable, so not shown: RELAY['REDACT'] or ['FORMATTER'] is set)")
        return _cut([text])


def _cut(found: Iterator[str] | list[str]) -> str:
    """Join pieces up to the limit. Pieces behind it are never made, however long the value is."""
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
    """Yield a value of JSON as text, laid out over lines and redacted piece by piece.

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


@dataclass(frozen=True)
class Redactor:
    """Hides values by the names of their arguments and keys."""

    names: Sequence[str]

    @cached_property
    def _plain(self) -> frozenset[str]:
        """The names as they are compared."""
        return frozenset(map(_plain, self.names))

    def __bool__(self) -> bool:
        """Whether anything is to be hidden."""
        return bool(self._plain)

    @cached_property
    def word(self) -> str:
        """The word in the place of a hidden value: translated once, since values may be many."""
        return hidden()

    def hides(self, name: object) -> bool:
        """Say whether values of a name are hidden."""
        return _plain(str(name)) in self._plain

    def all(self, value: Any, depth: int = 0) -> Any:
        """Return a value of JSON with the values of the names hidden."""
        if isinstance(value, dict):
            return {k: self.word if self.hides(k) else self.all(v, depth) for k, v in value.items()}
        if isinstance(value, list):
            return [self.all(item, depth) for item in value]
        return self.text(value, depth) if isinstance(value, str) else value

    def text(self, text: str, depth: int = 0) -> str:
        """Return a text whose JSON is redacted.

        In a text that is no JSON, a name before a colon or an equals sign hides the whole text: the
        end of its value cannot be known.
        """
        if not self or not self._mark.search(text):
            return text
        if depth >= MOST_TEXTS_IN_TEXTS:
            return self.word
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self.word
        if not isinstance(value, (dict, list, str)):
            return text
        return json.dumps(self.all(value, depth + 1), ensure_ascii=False)

    def arguments(self, task: str, value: Any) -> Any:
        """Return the arguments of a task with positional ones hidden by their parameters' names.

        All are hidden where those cannot be known: one of them may be the secret.
        """
        if not self or not isinstance(value, dict) or not isinstance(value.get("args"), list):
            return value
        places, word = self._places(task), self.word
        shown = [word if places(place) else item for place, item in enumerate(value["args"])]
        return {**value, "args": shown}

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        """The pattern of a name: quoted, escaped or bare, before a colon or an equals sign."""
        spelled = {name.lower().replace("-", "_") for name in self.names} | self._plain
        names = "|".join(re.escape(name).replace("_", "[-_]") for name in sorted(spelled))
        # JSON may have a letter as its number; then any key may be one of the names.
        return re.compile(rf"(?:{names})[\"'\\\s\]]*[:=]|\\u[0-9a-f]{{4}}", re.IGNORECASE)

    def _places(self, task: str) -> Callable[[int], bool]:
        """Return the function that says whether the argument at a place may have to be hidden."""
        layers = [*_layers(task)]
        if not layers:
            return lambda place: True
        if len(layers) > 1:
            # Wrappers may add, drop or move arguments on their way to the function.
            everything = any(self.hides(p.name) for layer in layers for p in layer)
            return lambda place: everything
        positional = [p for p in layers[0] if p.kind not in {p.KEYWORD_ONLY, p.VAR_KEYWORD}]
        return lambda place: self._may_be_named(positional, place)

    def _may_be_named(self, parameters: Sequence[inspect.Parameter], place: int) -> bool:
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
            if place >= len(parameters) - 1:
                return True  # an argument in ``*args`` has no name, as in a wrapper without `wraps`
            return self.hides(parameters[place].name)
        # No parameter takes it: the function has been changed since the job was enqueued.
        return place >= len(parameters) or self.hides(parameters[place].name)


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")


def _layers(task: str) -> Iterator[Sequence[inspect.Parameter]]:
    """Yield the parameters of a task's function and of the functions it wraps, the outermost first.

    Yields nothing if the module of the task is not loaded: nothing is imported for this.
    """
    module, _dot, name = task.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    function = getattr(found, "func", None)
    skip = 1 if getattr(found, "takes_context", False) else 0
    for _layer in range(MOST_LAYERS):
        if not callable(function):
            return
        try:
            signature = inspect.signature(function, follow_wrapped=False)
        except (ValueError, TypeError):
            return
        yield list(_without_context(signature.parameters.values(), skip))
        function = getattr(function, "__wrapped__", None)


def _without_context(
    parameters: Iterable[inspect.Parameter], skip: int
) -> Iterator[inspect.Parameter]:
    """Leave out the first parameter of a task that takes a context, unless ``*args`` takes it."""
    for place, parameter in enumerate(parameters):
        if place >= skip or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield parameter


def hidden() -> str:
    """Return the text in the place of a value that may not be seen."""
    return _("(hidden)")
