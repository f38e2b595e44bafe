"""Redacting: values of the names in ``RELAY["REDACT"]`` are hidden, at any depth.

A name is that of a keyword argument, of the parameter of a positional one, or a key of a
dictionary, also in texts that contain JSON. Case and the choice of ``-`` or ``_`` do not matter.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from django.utils.translation import gettext as _

MOST_LAYERS: Final = 50
"""Wrappers of a function that are unwrapped; more are taken for a circle."""

MOST_TEXTS_IN_TEXTS: Final = 5
"""How deep texts of JSON inside of texts of JSON are parsed; a deeper one is hidden."""


@dataclass(frozen=True)
class Redactor:
    """Hides values by the names of their arguments and keys."""

    names: Sequence[str]
    _plain: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        """Spell the names as they are compared."""
        object.__setattr__(self, "_plain", frozenset(map(_plain, self.names)))

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
