r"""Arguments and results as JSON text, and the checksum of what never changes in a job.

The text is canonical: keys are sorted, separators are compact, and every character outside ASCII is
escaped. So the bytes are the same on every database and under every encoding, and one character is
one byte. A NUL is storable because it is written as ``\u0000``.

What round-trips: None, booleans, integers of at most 4,300 digits, finite floats, strings without
lone surrogates, lists, and dictionaries with string keys. Tuples come back as lists. Values of a
subclass (``IntEnum``, ``StrEnum``, ``OrderedDict``, named tuples) are stored as the plain value
they equal and come back as that.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NoReturn, TypeGuard
from zlib import crc32

from relay_queue.exceptions import PayloadError, ResultError

# Python refuses to read integers with more digits, unless that limit is changed. A producer with
# another limit must not enqueue what a worker with the usual one cannot decode.
MAX_INTEGER_DIGITS: Final = 4300

NO_ARGUMENTS: Final = '{"args":[],"kwargs":{}}'
"""The text of a call without arguments: the shortest there is."""

_INTEGER_LIMIT: Final = 10**MAX_INTEGER_DIGITS
_SCALARS: Final = frozenset({type(None), bool, int, float, str})
_CONTAINERS: Final = frozenset({dict, list, tuple})
_STRINGS: Final = frozenset({str})
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_UNSTORABLE: Final = re.compile(r"[\x00\ud800-\udfff]")
_SHOWN_KEY_CHARS: Final = 60
_SHOWN_ERROR_CHARS: Final = 200
_IN_THE_TASK: Final = re.compile(" and [^.]* in the task")

# The circle check of the encoder costs time and is not needed: the depth is bounded before.
_ENCODER: Final = json.JSONEncoder(
    allow_nan=False,
    check_circular=False,
    ensure_ascii=True,
    separators=(",", ":"),
    sort_keys=True,
)

# What to pass instead, by the name of a class or of one of its bases.
_HINTS: Final = {
    "Model": "Pass its primary key and load it in the task.",
    "QuerySet": "Pass a list of primary keys and query in the task.",
    "date": "Pass value.isoformat() and parse it in the task.",
    "time": "Pass value.isoformat() and parse it in the task.",
    "timedelta": "Pass value.total_seconds().",
    "Decimal": "Pass str(value) and make it a Decimal in the task.",
    "UUID": "Pass str(value) and make it a UUID in the task.",
    "PurePath": "Pass str(value).",
    "Promise": "Pass str(value); it is a lazy string.",
    "Enum": "Pass its .value.",
    "bytes": "Pass text, for example base64, or store the bytes and pass a reference.",
    "bytearray": "Pass text, for example base64, or store the bytes and pass a reference.",
    "set": "Pass sorted(value), or a list.",
    "frozenset": "Pass sorted(value), or a list.",
    "generator": "Pass a list.",
}
_OTHER_HINT: Final = "Pass JSON values only, or an id that the task looks up."


def encode(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, max_bytes: int, max_depth: int
) -> str:
    """Return the canonical JSON text ``{"args":[…],"kwargs":{…}}`` of a job's arguments.

    ``max_bytes`` bounds the length of the text, ``max_depth`` how many lists and dictionaries may
    be nested inside ``args`` or ``kwargs``. Raises `PayloadError` with the path of the first value
    at fault.
    """
    if not args and not kwargs and max_bytes >= len(NO_ARGUMENTS):
        return NO_ARGUMENTS  # as many periodic jobs have them
    roots = {"args": list(args), "kwargs": dict(kwargs)}
    text = _encode_plain(roots, roots.values(), max_bytes, max_depth)
    if text is None:
        search = _Conversion("the arguments", "MAX_PAYLOAD_BYTES", max_bytes, max_depth)
        text = search.encode(roots, lambda found: found)
    return text


def encode_result(value: Any, *, max_bytes: int, max_depth: int) -> str:
    """Return the canonical JSON text of a function's result.

    ``max_depth`` bounds the nesting inside the outermost container. What ``json.dumps`` or the
    framework turns into JSON is taken, too: keys that are numbers, booleans or None become text,
    other mappings and sequences become dictionaries and lists, and UTF-8 as bytes becomes text. To
    refuse it would cost the work of the function. Raises `ResultError` with the path of the first
    value at fault; paths start with ``result``.
    """
    text = _encode_plain(value, (value,), max_bytes, max_depth)
    if text is None:
        search = _ResultConversion("the result", "MAX_RESULT_BYTES", max_bytes, max_depth)
        try:
            text = search.encode({"result": value}, itemgetter("result"))
        except PayloadError as refusal:
            raise ResultError(str(refusal), refusal.path) from refusal.__cause__
    return text


def decode(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a text that `encode` made.

    Raises `PayloadError` when the text is not JSON or has another shape. Whether it is the very
    text that was enqueued is the business of `checksum`.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PayloadError(f"the stored payload cannot be read: {error}") from error
    if isinstance(value, dict) and value.keys() == {"args", "kwargs"}:
        args, kwargs = value["args"], value["kwargs"]
        if isinstance(args, list) and isinstance(kwargs, dict):
            return args, kwargs
    raise PayloadError('the stored payload is not {"args": [...], "kwargs": {...}}')


def is_bounded(values: Iterable[object], *, max_items: int, max_depth: int) -> bool:
    """Say whether values that are no JSON yet hold few enough items to be made JSON.

    A range, or a page of rows, says how long it is without having a single item. To list a thousand
    million of them before the text is found too large would take all memory. Raises what the values'
    own code raises.
    """
    level, items = list(values), 0
    for _ in range(max_depth + 1):
        holders = [value for value in level if _holds_items(value)]
        items += sum(map(len, holders))
        if items > max_items:
            return False
        level = [
            item
            for holder in holders
            for item in (holder.values() if isinstance(holder, Mapping) else holder)
        ]
    return not any(map(_holds_items, level))


def checksum(queue: str, backend: str, task: str, payload: str, key: str | None) -> int:
    """Return the CRC-32 (unsigned) over the fields of a job that never change."""
    return crc32(_signed_tail(payload, key), _head_crc(queue, backend, task))


def clean_text(text: object, max_chars: int) -> str:
    """Return ``text`` as a string that every database can store, of at most ``max_chars``.

    Lone surrogates and NULs are replaced. A longer text loses its middle to a marker that says how
    much was cut, since the beginning and the end of a traceback tell most. Never raises.
    """
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", _shorten(_as_string(text), max_chars))


def _holds_items(value: object) -> TypeGuard[Sequence[object] | Mapping[Any, object]]:
    return isinstance(value, Sequence | Mapping) and not isinstance(value, str | bytes)


def _encode_plain(value: Any, roots: Iterable[Any], max_bytes: int, max_depth: int) -> str | None:
    """Encode a value of plain JSON types with the C encoder, or return None for a closer look."""
    if not _is_plain(roots, max_bytes, max_depth):
        return None
    try:
        text = _ENCODER.encode(value)
    except (ValueError, RecursionError):
        return None
    # An escaped surrogate may be half of a legal pair; the slow search tells.
    if len(text) > max_bytes or "\\ud" in text or _may_hide_long_integer(text):
        return None
    return text


def _is_plain(roots: Iterable[Any], max_items: int, max_depth: int) -> bool:
    """Say whether values and keys are of exact JSON types and nested within bounds.

    The encoder would turn other keys into strings without an error. It goes level by level and
    counts the items, each of which takes at least a byte. That bounds the work for circles, and for
    containers that hold each other many times.
    """
    level, items = roots, 0
    for _ in range(max_depth + 1):
        deeper: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _SCALARS:
                continue
            if kind not in _CONTAINERS:
                return False
            items += len(value)
            if items > max_items:
                return False
            if kind is dict:
                if not _STRINGS.issuperset(map(type, value)):
                    return False
                deeper += value.values()
            else:
                deeper += value
        if not deeper:
            return True
        level = deeper
    return _SCALARS.issuperset(map(type, level))


def _may_hide_long_integer(text: str) -> bool:
    """Say whether the encoder of this process may have written an integer others cannot read."""
    long = len(text) > MAX_INTEGER_DIGITS
    return long and not 0 < sys.get_int_max_str_digits() <= MAX_INTEGER_DIGITS


@dataclass(slots=True)
class _Conversion:
    """Copies a value, depth first, within limits. Raises `PayloadError` for the first part at fault.

    ``what`` is being encoded, and ``setting`` is where its ``max_bytes`` come from.
    """

    what: str
    setting: str
    max_bytes: int
    max_depth: int
    items: int = 0
    ancestors: set[int] = field(default_factory=set)

    def encode(self, roots: Mapping[str, Any], whole: Callable[[dict[str, Any]], Any]) -> str:
        """Encode the copy, or raise for a value with its path.

        ``roots`` holds the outermost values by the name that their paths start with, and ``whole``
        makes of them what is encoded. Code of the values' own may run, and raise anything.
        """
        try:
            converted = {name: self.convert(root, name, 0) for name, root in roots.items()}
            text = _ENCODER.encode(whole(converted))
        except PayloadError:
            raise
        except Exception as error:
            reason = clean_text(error, _SHOWN_ERROR_CHARS)
            raise PayloadError(f"{self.what} cannot be stored as JSON: {reason}") from error
        if len(text) > self.max_bytes:
            raise self._too_large(f"{len(text):,}")
        return text

    def convert(self, value: object, path: str, depth: int) -> Any:
        """Return one value, which lies inside ``depth`` containers, as JSON types."""
        value = self.plain(value, path)
        self.items += 1
        # Before they are listed: a range says how long it is without having a single item.
        size = len(value) if self.holds_items(value) else 0
        if self.items + size > self.max_bytes:
            raise self._too_large(f"more than {self.max_bytes:,}")
        if not self.holds_items(value):
            self.require_scalar(value, path)
            return value
        self._enter(value, path, depth)
        converted: Any
        if isinstance(value, Mapping):
            converted = self._convert_items(value, path, depth)
        else:
            converted = [
                self.convert(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(value)
            ]
        self.ancestors.discard(id(value))
        return converted

    def plain(self, value: object, path: str) -> object:
        """Return a value that is no container as JSON has it; here as it is."""
        return value

    def key(self, key: object, path: str) -> Any:
        """Return a key as JSON has it; here as it is."""
        return key

    def holds_items(self, value: object) -> TypeGuard[Sequence[object] | Mapping[Any, object]]:
        """Say whether a value becomes a list or a dictionary."""
        return isinstance(value, (dict, list, tuple))

    def hint(self, value: object) -> str:
        """Return what to pass instead of a value."""
        return _hint_for(value)

    def require_scalar(self, value: object, path: str) -> None:
        """Raise `PayloadError` unless JSON has a value that is no container."""
        if isinstance(value, str):
            if _SURROGATE.search(value):
                raise _fault(path, "is a string with a lone surrogate, which is not Unicode text.")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _fault(path, f"is {float(value)!r}, and JSON has finite numbers only.")
        elif isinstance(value, int):
            if not -_INTEGER_LIMIT < value < _INTEGER_LIMIT:
                limit = f"{MAX_INTEGER_DIGITS:,}"
                raise _fault(path, f"is an integer of more than {limit} digits. Pass it as text.")
        elif value is not None:
            name = type(value).__name__
            raise _fault(path, f"is of type {name}, which JSON does not have. {self.hint(value)}")

    def _too_large(self, size: str) -> PayloadError:
        return PayloadError(
            f"{self.what} would take {size} bytes as JSON; the limit is {self.max_bytes:,}. Store "
            f'the data elsewhere and pass a reference to it, or raise RELAY["{self.setting}"].'
        )

    def _enter(self, value: object, path: str, depth: int) -> None:
        if id(value) in self.ancestors:
            raise _fault(path, "contains itself.")
        if depth > self.max_depth:
            limit = f'{self.max_depth}, RELAY["MAX_PAYLOAD_DEPTH"]'
            raise _fault(path, f"is nested too deep; the limit is {limit}. Flatten the data.")
        self.ancestors.add(id(value))

    def _convert_items(
        self, value: Mapping[Any, object], path: str, depth: int
    ) -> dict[str, object]:
        converted: dict[str, object] = {}
        for key, item in value.items():
            text = self.key(key, path)
            where = f"{path}[{_checked_key(text, path)}]"
            if text in converted:
                raise _fault(where, "is there twice, since JSON keys are text. Use other keys.")
            converted[text] = self.convert(item, where, depth + 1)
        return converted


class _ResultConversion(_Conversion):
    """Makes a value of JSON types from a result, as ``json.dumps`` and the framework do."""

    __slots__ = ()

    def plain(self, value: object, path: str) -> object:
        """Return bytes as the text that they are."""
        return _decoded(value, path) if isinstance(value, bytes) else value

    def key(self, key: object, path: str) -> Any:
        """Return a key as ``json.dumps`` spells it; what it does not spell is returned as it is."""
        if key is None or isinstance(key, bool):
            return {None: "null", True: "true", False: "false"}[key]
        if isinstance(key, int):
            return int.__repr__(key)
        if isinstance(key, float) and math.isfinite(key):
            return float.__repr__(key)
        return self.plain(key, path)

    def holds_items(self, value: object) -> TypeGuard[Sequence[object] | Mapping[Any, object]]:
        """Say whether a value is a sequence or a mapping of any type."""
        return _holds_items(value)

    def hint(self, value: object) -> str:
        """Return what to return instead of a value."""
        return _IN_THE_TASK.sub("", _hint_for(value)).replace("Pass", "Return", 1)


def _decoded(value: bytes, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _fault(
            path, "has bytes that are not UTF-8. Return text, for example base64."
        ) from None


def _checked_key(key: object, path: str) -> str:
    """Return the spelling of a key for a path. Raises `PayloadError` for an unusable key."""
    if not isinstance(key, str):
        name = type(key).__name__
        raise _fault(path, f"has a key of type {name}, and JSON keys are strings. Use str(key).")
    if _SURROGATE.search(key):
        raise _fault(path, "has a key with a lone surrogate, which is not Unicode text.")
    shown = str.__str__(key)
    if len(shown) > _SHOWN_KEY_CHARS:
        shown = shown[:_SHOWN_KEY_CHARS] + "…"
    return repr(shown)


def _fault(path: str, what: str) -> PayloadError:
    return PayloadError(f"{path} {what}", path)


def _hint_for(value: object) -> str:
    names = (base.__name__ for base in type(value).__mro__)
    return next((_HINTS[name] for name in names if name in _HINTS), _OTHER_HINT)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _signed_head(queue: str, backend: str, task: str) -> bytes:
    """Return an unambiguous encoding: lengths stand before texts, so no two jobs share one."""
    head = f"{len(queue)}:{queue}{len(backend)}:{backend}{len(task)}:{task}"
    return head.encode("utf-8", "surrogatepass")


def _signed_tail(payload: str, key: str | None) -> bytes:
    tail = "-" if key is None else f"{len(key)}:{key}"
    return f"{len(payload)}:{payload}{tail}".encode("utf-8", "surrogatepass")


@lru_cache(maxsize=1024)
def _head_crc(queue: str, backend: str, task: str) -> int:
    """Return the checksum so far; a project has few of these and many jobs of each."""
    return crc32(_signed_head(queue, backend, task))


def _as_string(text: object) -> str:
    try:
        return str.__str__(str(text))
    except BaseException:  # noqa: BLE001 - a broken __str__ may raise anything, SystemExit included
        return f"{object.__repr__(text)} (its str() raised)"


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    # Leave room for the longest marker this text could need; the right one may be shorter.
    room = max_chars - len(_marker(len(text)))
    if room < 2:
        return text[: max(max_chars, 0)]
    head = (room + 1) // 2
    return text[:head] + _marker(len(text) - room) + text[len(text) - (room - head) :]


def _marker(cut: int) -> str:
    return f" … [{cut:,} characters cut] … "
