"""What ``relay drill`` shows and how it ends, given what its rows have observed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import CommandError

from relay_queue.cli.output import Output, Styled
from relay_queue.drill import crew
from relay_queue.drill.observation import Observation, at_most, contains, equal, untried
from relay_queue.drill.promises import PROMISES
from relay_queue.drill.result import Result
from relay_queue.drill.rows import DAMAGED, ROWS

Relay = Callable[..., Any]
GOOD = equal("attempts", ["lost", "acked"], ["lost", "acked"])
BAD = equal("attempts", ["acked"], ["lost", "acked"])


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Return a function that sets what the rows observe; it returns where they were executed."""

    def can(*observed: Observation, fault: str = "") -> list[Path]:
        places: list[Path] = []

        def play(rows: Sequence[str], directory: Path) -> Generator[Result]:
            assert directory.is_dir()
            places.append(directory)
            yield from (Result(row, observed, fault) for row in reversed(rows))

        monkeypatch.setattr(crew, "play", play)
        return places

    return can


# -- observations


@pytest.mark.parametrize(
    ("seen", "text", "held"),
    [
        (GOOD, "attempts: lost, acked", True),
        (BAD, "attempts: acked (promised: lost, acked)", False),
        (equal("changed", [], []), "changed: none", True),
        (equal("result", None, "kept"), "result: nothing (promised: kept)", False),
        (at_most("leases", 1000, 2), "leases: 1,000 (promised: at most 2)", False),
        (at_most("leases", 2, 2), "leases: 2", True),
        (contains("error", "Checksum: bad\nmore", "sum"), "error: Checksum: bad", True),
        (contains("error", "", "sum"), "error: nothing (promised: … sum …)", False),
        (untried("a write", "no way"), "a write: not tried, no way", True),
    ],
)
def test_an_observation_says_what_was_found_and_whether_it_held(
    seen: Observation, text: str, held: bool
) -> None:
    assert (str(seen), seen.held) == (text, held)


@pytest.mark.parametrize(
    ("observed", "fault", "verdict"),
    [([GOOD], "", "kept"), ([GOOD, BAD], "", "differs"), ([GOOD], "late", "differs")],
)
def test_one_difference_decides(observed: list[Observation], fault: str, verdict: str) -> None:
    result = Result("F1", observed, fault)
    assert result.verdict == verdict
    assert Result.of(json.loads(json.dumps(result.as_data()))).verdict == verdict


def test_a_row_that_has_seen_nothing_differs() -> None:
    assert Result("F1").verdict == "differs"


def test_every_promise_has_a_row_that_is_executed() -> None:
    assert list(ROWS) == list(PROMISES)
    assert set(ROWS) > DAMAGED


# -- the verb


def test_rows_are_shown_in_the_order_of_the_table(relay: Relay, canned: Any) -> None:
    places = canned(GOOD)
    answer = relay("drill", "--json")
    assert answer.code == 0
    assert [row["row"] for row in answer.data["rows"]] == list(PROMISES)
    assert (answer.data["kept"], answer.data["differ"]) == (15, 0)
    assert not places[0].exists(), "the folder is removed"


def test_a_difference_is_told_and_is_exit_code_1(relay: Relay, canned: Any) -> None:
    canned(GOOD, BAD)
    answer = relay("drill", "--row", "f2")
    assert answer.code == 1
    assert "attempts: acked (promised: lost, acked)" in answer.text
    assert "verdict   differs" in answer.text
    assert answer.text.endswith("0 of 1 kept, 1 differ, in 0 s.\n")
    assert max(map(len, answer.text.splitlines())) <= 80


def test_a_row_that_was_cut_short_says_why(relay: Relay, canned: Any) -> None:
    canned(GOOD, fault="job 1 dead did not happen in time")
    answer = relay("drill", "--row", "F7", "--json")
    assert answer.code == 1
    (row,) = answer.data["rows"]
    assert (row["verdict"], row["fault"]) == ("differs", "job 1 dead did not happen in time")


def test_the_folder_is_removed_when_a_row_raises(
    relay: Relay, canned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = canned(GOOD)
    monkeypatch.setattr(Result, "kept", property(lambda _self: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        relay("drill")
    assert not places[0].exists()


@pytest.mark.parametrize("text", ["F16", "4", "F"])
def test_an_unknown_row_is_refused_with_those_there_are(relay: Relay, text: str) -> None:
    with pytest.raises(CommandError, match=f"'{text}' is not a row.*The rows are F1, F2, .*F15"):
        relay("drill", "--row", text)


# -- tall tables


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_tall_table_keeps_to_the_width_and_shows_what_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    for name, value in {"COLUMNS": "80", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    words = "several words that are rather long " * 3
    row = [words, ["first [fact]", Styled("second", "bad")], Styled("differs", "bad")]
    Output(terminal, terminal).table(["what", "seen", "verdict"], [row], tall=(1, 2, 0))
    text = terminal.getvalue()
    assert "- first [fact]" in text
    assert "\x1b[1;31m- second" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) == 80
