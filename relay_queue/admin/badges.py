"""Badges: a state or an outcome as a word with an icon, so that colour is never the only sign.

Pages that show them load ``relay_queue/tokens.css``.
"""

from __future__ import annotations

from typing import Final

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from relay_queue.states import Outcome, State

CHECK: Final = "M3 8.5 6.5 12 13 4.5"
CLOCK: Final = "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M8 4.8V8l2.2 1.6"
CROSS: Final = "m4 4 8 8m0-8-8 8"
LINES: Final = "M3 4h10M3 8h10M3 12h6"
LOOP: Final = "M13 8a5 5 0 1 1-1.5-3.6M13 2v3.2H9.8"
PLAY: Final = "M5 3v10l8-5z"
SLASHED: Final = "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M3.8 3.8l8.4 8.4"
WARNING: Final = "M8 2v7.5M8 13.5v.1"
BROKEN: Final = "M2 8h4m4 0h4M6 4.5v7m4-7v7"
BACK: Final = "M6.5 3.5 2.5 7.5l4 4M2.5 7.5H10a3.5 3.5 0 0 1 0 6"
MOON: Final = "M13 9.5A5.6 5.6 0 0 1 6.5 3 5.6 5.6 0 1 0 13 9.5z"
PAUSE: Final = "M5.5 3.5v9m5-9v9"

ICONS: Final[dict[str, str]] = {
    State.SCHEDULED: CLOCK,
    State.READY: LINES,
    State.RUNNING: PLAY,
    State.RETRYING: LOOP,
    State.SUCCEEDED: CHECK,
    State.DEAD: CROSS,
    State.CANCELLED: SLASHED,
    Outcome.ACKED: CHECK,
    Outcome.FAILED: WARNING,
    Outcome.FATAL: CROSS,
    Outcome.TIMED_OUT: CLOCK,
    Outcome.EXPIRED: CLOCK,
    Outcome.LOST: BROKEN,
    Outcome.RELEASED: BACK,
    Outcome.SNOOZED: MOON,
}
"""Paths on a grid of 16, drawn as lines. A cancelled job and a cancelled lease look alike."""


def state_badge(state: str) -> SafeString:
    """Return the badge of a job's state. One that is not known is shown as it is."""
    if state not in State.values:
        return badge("unknown", state, WARNING)
    return badge(state, State(state).label, ICONS[state])


def outcome_badge(outcome: str | None) -> SafeString:
    """Return the badge of how a lease ended; None is a lease that is still open."""
    if outcome is None:
        return badge("open", _("Open"), PLAY)
    if outcome not in Outcome.values:
        return badge("unknown", outcome, WARNING)
    return badge(outcome, Outcome(outcome).label, ICONS[outcome])


def badge(kind: str, text: object, path: str) -> SafeString:
    """Return a badge of a kind that ``tokens.css`` knows, with a text and the path of its icon."""
    return format_html(
        '<span class="relay-badge relay-badge--{}">{}{}</span>', kind, icon(path), text
    )


def icon(path: str) -> SafeString:
    """Return a path of this module as a picture that screen readers pass over."""
    return format_html(
        '<svg viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d="{}"/></svg>', path
    )
