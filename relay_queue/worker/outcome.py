"""What became of an attempt, as the settlement that the store understands.

Whatever a function raised, its texts are storable and bounded here, and looking at it never takes
the worker down: an exception's ``str()``, its class's name and its traceback may all raise.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from relay_queue import conf
from relay_queue.backoff import MAX_DELAY_SECONDS
from relay_queue.exceptions import (
    Cancelled,
    InvalidJob,
    Retry,
    Snooze,
    TimedOut,
    shown,
)
from relay_queue.payload import clean_text, encode_result
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker.attempt import Attempt

MAX_CLASS_PATH_CHARS = 255
"""The column that holds the path of an exception's class."""

_OUR_MODULE = "relay_queue.worker.executor"


class NotBegun(Exception):
    """The function did not begin, for a reason that is not the job's: it goes back uncharged."""


def success(claim: Claim, value: object) -> Settlement:
    """Return the ack with the function's result. Raises `ResultError` if it cannot be stored."""
    if value is None:
        return claim.settlement("ack", "null")
    settings = conf.get()
    size, depth = settings.max_result_bytes, settings.max_payload_depth
    text = encode_result(value, max_bytes=size, max_depth=depth)
    return claim.settlement("ack", text)


def failure(attempt: Attempt, error: BaseException) -> Settlement:
    """Return what the function asked for by raising ``error``: nack or snooze. Never raises.

    A function that could not begin asks for nothing: its job is released.
    """
    claim, kind = attempt.claim, type(error)
    try:
        if issubclass(kind, Snooze):
            seconds = _delay_seconds("Snooze", error.seconds)  # type: ignore[attr-defined]
            return claim.settlement("snooze", delay_seconds=seconds)
        settlement = describe(claim, error)
        if kind is NotBegun:
            return claim.settlement("release", message=settlement.message, unrun=True)
        settlement.timed_out = issubclass(kind, TimedOut) or (
            issubclass(kind, Cancelled) and attempt.context.timed_out
        )
        settlement.fatal = attempt.plan.rules.are_fatal(kind)
        if issubclass(kind, Retry):
            seconds = _delay_seconds("Retry", error.after_seconds)  # type: ignore[attr-defined]
            settlement.delay_seconds = seconds
    except InvalidJob as wrong:
        return describe(claim, wrong)
    except BaseException:  # noqa: BLE001 - code of the exception's class may raise anything
        return describe(claim, error)
    return settlement


def describe(claim: Claim, error: BaseException, *, fatal: bool = False) -> Settlement:
    """Return a nack that says what ``error`` was. Never raises."""
    settings = conf.get()
    path = class_path(type(error))
    name = path.rpartition(".")[2]
    # Bounded before the lines are joined: the text may be very long.
    room = settings.max_error_chars - len(name) - len(": ")
    text = " ".join(clean_text(error, room).split())
    message = f"{name}: {text}" if text else name
    return claim.settlement(
        "nack",
        error=path,
        message=clean_text(message, settings.max_error_chars),
        traceback=clean_text(_format(error), settings.max_traceback_chars),
        fatal=fatal,
    )


def uncommitted(claim: Claim, settlement: Settlement, aliases: Sequence[str]) -> Settlement:
    """Return ``settlement``, or a nack if it is an ack although the function's writes are gone.

    ``aliases`` are the connections that it left in a transaction, which was rolled back.
    """
    return describe(claim, left_open(aliases)) if settlement.verb == "ack" else settlement


def left_open(aliases: Sequence[str]) -> RuntimeError:
    """Return the error of a function that returned with a transaction open on these aliases."""
    where = ", ".join(map(repr, aliases))
    return RuntimeError(
        f"the function left a transaction open on {where}, so nothing was committed there; "
        "it was rolled back"
    )


def class_path(kind: type) -> str:
    """Return the dotted path of a class, bounded and storable. Never raises."""
    try:
        path = f"{kind.__module__}.{kind.__qualname__}"
    except BaseException:  # noqa: BLE001 - a metaclass may compute its names
        path = type.__repr__(kind).removeprefix("<class '").removesuffix("'>")
    return clean_text(path, MAX_CLASS_PATH_CHARS)


def _format(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, _own_frames(error)))
    except BaseException as wrong:  # noqa: BLE001 - it looks at notes, causes and source lines
        return f"(the traceback could not be rendered: {class_path(type(wrong))})"


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of Relay that lead to the function."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == _OUR_MODULE:
        frames = frames.tb_next
    return frames or error.__traceback__


def _delay_seconds(what: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Not a number fails here, too, and no huge integer is made a float.
    if not number or not 0 <= value <= MAX_DELAY_SECONDS:
        raise InvalidJob(
            f"{what} was raised with {shown(value)}; "
            f"use seconds between 0 and {MAX_DELAY_SECONDS:,.0f} (ten years)."
        )
    return float(value)
