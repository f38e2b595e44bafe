"""What ``relay drill`` shows and how it ends, given what its rows have observed."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import CommandError

from relay_queue.cli.output import Output, Styled
from relay_queue.lab.drill import runner
from relay_queue.lab.drill.results import (
    PROMISES,
    Observation,
    Result,
    at_most,
    contains,
    equal,
    untried,
)
from relay_queue.lab.drill.rows import DAMAGED, ROWS
from relay_queue.lab.processes import undisturbed
from relay_queue.lab.server import Server

Relay = Callable[..., Any]
GOOD = equal("attempts", ["lost", "acked"], ["lost", "acked"])
BAD = equal("attempts", ["acked"], ["lost", "acked"])


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Return a function that sets what the rows observe; it returns where they were executed."""

    def can(*observed: Observation, fault: str = "") -> list[Path]:
        places: list[Path] = []

        def play(rows: Sequence[str], site: runner.Site) -> Generator[Result]:
            assert site.directory.is_dir()
            places.append(site.directory)
            yield from (Result(row, observed, fault) for row in reversed(rows))

        monkeypatch.setattr(runner, "play", play)
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


def test_a_row_that_does_not_apply_neither_holds_nor_differs() -> None:
    result = Result("F13", reason="a server guards its files")
    assert result.verdict == "not applicable"
    assert Result.of(json.loads(json.dumps(result.as_data()))).as_data() == result.as_data()


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
    assert (answer.data["engine"], answer.data["not_applicable"]) == ("sqlite", 0)
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
    monkeypatch.setattr(Result, "verdict", property(lambda _self: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        relay("drill")
    assert not places[0].exists()


@pytest.mark.parametrize("text", ["F16", "4", "F"])
def test_an_unknown_row_is_refused_with_those_there_are(relay: Relay, text: str) -> None:
    with pytest.raises(CommandError, match=f"'{text}' is not a row.*The rows are F1, F2, .*F15"):
        relay("drill", "--row", text)


# -- on a server


class Roomy(Server):
    """A server of which only the free connections are asked for."""

    free = 100

    def free_connections(self) -> int:
        return self.free


def test_rows_about_files_are_not_executed_on_a_server(tmp_path: Path) -> None:
    (result,) = runner.play(["F13"], runner.Site(tmp_path, Roomy({}), "x"))
    assert (result.verdict, result.reason) == ("not applicable", PROMISES["F13"].not_on_server)
    assert [name for name, row in PROMISES.items() if row.not_on_server] == ["F13"]


def test_what_does_not_apply_is_told_with_its_reason_and_is_no_difference(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "of", lambda _alias: Roomy({}))
    monkeypatch.setattr(Server, "right_to_create", lambda _self: ("app", True))
    answer = relay("drill", "--row", "F13")
    assert answer.code == 0
    assert "On scratch databases relay_drill_" in answer.text
    assert "pg_amcheck" in answer.text
    assert answer.text.endswith("0 of 1 kept, 1 not applicable, in 0 s.\n")


def test_fewer_rows_run_side_by_side_where_a_server_has_few_connections_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = runner.Site(tmp_path, Roomy({}), "x")
    assert site.at_once() == runner.Site(tmp_path).at_once()
    monkeypatch.setattr(Roomy, "free", 5)
    assert site.at_once() == 1


def test_a_role_that_may_make_no_database_is_told_the_right_and_the_way_out(
    relay: Relay, canned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "of", lambda _alias: Roomy({}))
    monkeypatch.setattr(Server, "right_to_create", lambda _self: ("app", False))
    with pytest.raises(CommandError, match=r'lacks CREATEDB. Run ALTER ROLE "app" .* --sqlite'):
        relay("drill")
    canned(GOOD)
    assert relay("drill", "--sqlite", "--json").data["engine"] == "sqlite"


def test_an_order_to_leave_waits_until_a_database_is_made_or_dropped() -> None:
    def leave(_number: int, _frame: Any) -> None:
        raise SystemExit(3)

    def make() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGTERM)
            done.append("all of it")

    before = signal.signal(signal.SIGTERM, leave)
    done: list[str] = []
    try:
        with pytest.raises(SystemExit):
            make()
        assert (done, signal.getsignal(signal.SIGTERM)) == (["all of it"], leave)
    finally:
        signal.signal(signal.SIGTERM, before)


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
