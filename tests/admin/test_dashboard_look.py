"""The look that all pages share: badges can be read in light and dark, and by screen readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relay_queue.admin.formatting import outcome_badge, state_badge
from relay_queue.states import Outcome, State
from tests.conftest import ROOT

STATIC = ROOT / "relay_queue" / "static" / "relay_queue"
TOKENS = (STATIC / "tokens.css").read_text()
TONE = re.compile(r"--relay-(\w+)-(fg|bg): light-dark\((#\w{6}), (#\w{6})\)")
TONES = sorted({name for name, kind, _, _ in TONE.findall(TOKENS) if kind == "fg"})
LEAST_CONTRAST = 4.5


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("tone", TONES)
def test_text_of_a_badge_stands_out_from_its_ground(tone: str, theme: str) -> None:
    colours = {
        kind: light if theme == "light" else dark
        for name, kind, light, dark in TONE.findall(TOKENS)
        if name == tone
    }
    assert contrast(colours["fg"], colours["bg"]) >= LEAST_CONTRAST, colours


@pytest.mark.parametrize("kind", [*State.values, *Outcome.values, "open", "unknown"])
def test_every_badge_has_its_colours(kind: str) -> None:
    assert re.search(rf"\.relay-badge--{kind}[,\s]", TOKENS)


@pytest.mark.parametrize("state", State.values)
def test_badge_of_a_state_has_its_word_and_an_icon(state: str) -> None:
    shown = state_badge(state)
    assert str(State(state).label) in shown
    assert f"relay-badge--{state}" in shown
    assert 'aria-hidden="true"' in shown


@pytest.mark.parametrize("outcome", [*Outcome.values, None])
def test_badge_of_an_outcome_has_its_word_and_an_icon(outcome: str | None) -> None:
    shown = outcome_badge(outcome)
    assert (str(Outcome(outcome).label) if outcome else "Open") in shown
    assert 'aria-hidden="true"' in shown


@pytest.mark.parametrize("make", [state_badge, outcome_badge])
def test_altered_value_is_shown_as_text(make: object) -> None:
    shown = make("<b onclick=x>")  # type: ignore[operator]
    assert "&lt;b onclick=x&gt;" in shown
    assert "relay-badge--unknown" in shown


def test_static_files_name_no_other_host() -> None:
    for path in Path(STATIC).iterdir():
        assert "://" not in path.read_text().replace("http://www.w3.org/2000/svg", ""), path
