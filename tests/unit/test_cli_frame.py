import argparse
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError

from relay_queue.cli import base
from relay_queue.cli.output import Output, cell
from relay_queue.exceptions import QueueFull, RelayError
from tests.conftest import ROOT


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def run_status(*arguments: str) -> tuple[str, str]:
    """Run the verb ``status``; return what it wrote to its output and its errors."""
    out, errors = io.StringIO(), io.StringIO()
    call_command("relay", "status", *arguments, stdout=out, stderr=errors)
    return out.getvalue(), errors.getvalue()


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts another ``run`` in the place of the verb ``status``."""

    def replace(run: Callable[[argparse.Namespace, Output], int]) -> None:
        module = types.ModuleType("relay_queue.cli.status")

        def declare(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("queue", nargs="?")

        vars(module)["VERBS"] = {"status": base.Verb(run, declare, "Show it.")}
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return replace


def relay(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``manage.py relay`` as a process."""
    return subprocess.run(
        [sys.executable, "manage.py", "relay", *arguments],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_verb_gets_its_arguments_and_those_of_django(status: Callable[..., None]) -> None:
    seen: dict[str, Any] = {}

    def run(options: argparse.Namespace, out: Output) -> int:
        seen.update(vars(options))
        out.line("all is well")
        return 0

    status(run)
    assert run_status("mail", "-v", "2") == ("all is well\n", "")
    assert (seen["queue"], seen["verbosity"], seen["json"]) == ("mail", 2, False)


def test_options_before_the_verb_count_as_well(status: Callable[..., None]) -> None:
    seen: list[int] = []
    status(lambda options, out: seen.append(options.verbosity) or 0)
    call_command("relay", "--verbosity", "3", "status")
    assert seen == [3]


def test_the_exit_code_is_the_one_of_the_verb(status: Callable[..., None]) -> None:
    status(lambda options, out: 1)
    with pytest.raises(SystemExit) as leaving:
        run_status()
    assert leaving.value.code == 1


def test_with_json_only_data_is_written(status: Callable[..., None]) -> None:
    def run(options: argparse.Namespace, out: Output) -> int:
        out.table(["queue"], [["mail"]])
        out.facts({"depth": 3})
        with out.progress("copying") as tell:
            tell(1, 1)
        out.data(depth=3, at=datetime(2030, 1, 2, tzinfo=UTC))
        return 0

    status(run)
    assert json.loads(run_status("--json")[0]) == {"depth": 3, "at": "2030-01-02T00:00:00Z"}
    assert "depth  3" in run_status()[0]
    assert "{" not in run_status()[0]


def test_an_expected_error_is_one_message(status: Callable[..., None]) -> None:
    def run(options: argparse.Namespace, out: Output) -> int:
        raise QueueFull("mail", 10)

    status(run)
    with pytest.raises(CommandError, match="queue 'mail' is full"):
        run_status()


def test_with_traceback_the_error_itself_is_raised(status: Callable[..., None]) -> None:
    def run(options: argparse.Namespace, out: Output) -> int:
        raise QueueFull("mail", 10)

    status(run)
    with pytest.raises(QueueFull):
        run_status("--traceback")


def test_an_unexpected_error_is_not_hidden(status: Callable[..., None]) -> None:
    def run(options: argparse.Namespace, out: Output) -> int:
        raise LookupError("a mistake in the code")

    status(run)
    with pytest.raises(LookupError):
        run_status()


def test_an_interrupt_ends_the_verb_without_a_traceback(status: Callable[..., None]) -> None:
    def run(options: argparse.Namespace, out: Output) -> int:
        raise KeyboardInterrupt

    status(run)
    with pytest.raises(SystemExit) as leaving:
        run_status()
    assert leaving.value.code == 130


def test_a_reader_that_has_gone_ends_the_verb_quietly() -> None:
    source = """
import sys, types
import django
from django.core.management import execute_from_command_line
from relay_queue.cli import base
def run(options, out):
    for number in range(int(options.lines)):
        out.line(str(number))
    return 0
verb = types.ModuleType("relay_queue.cli.status")
verb.VERBS = {"status": base.Verb(run, lambda parser: parser.add_argument("lines"))}
sys.modules[verb.__name__] = verb
execute_from_command_line(["manage.py", "relay", "status", sys.argv[1]])
"""
    for lines in ("1", "100000"):  # an error at the last flush, and one on the way
        process = subprocess.Popen(
            [sys.executable, "-c", source, lines],
            cwd=ROOT,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (141, "")


def test_missing_tables_lead_to_migrate() -> None:
    message = base.explain(OperationalError("no such table: relay_queue_job"))
    assert "manage.py migrate" in message
    assert "no such table: relay_queue_job" in message


def test_other_database_errors_are_named() -> None:
    message = base.explain(OperationalError("database is locked"))
    assert message == "the database cannot be used: database is locked"
    assert base.explain(RelayError()) == "RelayError"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("stauts", "Did you mean 'status'"),
        ("xyzzy", "The verbs are demo, drill"),
        ("nope", "The verbs are demo, drill"),
    ],
)
def test_an_unknown_verb_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(CommandError, match=hint):
        call_command("relay", text)


def test_a_verb_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.VERBS, "absent", "not there")
    with pytest.raises(CommandError, match="relay absent is not part of this installation"):
        call_command("relay", "absent")


def test_the_help_lists_every_verb() -> None:
    help_text = relay("--help")
    assert help_text.returncode == 0, help_text.stderr
    for verb, line in base.VERBS.items():
        assert f"{verb} " in help_text.stdout
        assert line in help_text.stdout


def test_wrong_usage_exits_with_2_and_no_traceback() -> None:
    wrong = relay("stauts")
    assert wrong.returncode == 2
    assert "Did you mean 'status'?" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    missing = relay()
    assert missing.returncode == 2
    assert "Name a verb: demo" in missing.stderr


def text_output(stream: io.StringIO | None = None) -> tuple[Output, io.StringIO]:
    stream = stream or io.StringIO()
    return Output(stream, io.StringIO()), stream


def test_an_error_on_the_command_line_ends_its_line(tmp_path: Path) -> None:
    refused = relay("status", RELAY_TEST_DB=str(tmp_path / "empty.sqlite3"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("CommandError: the tables of Relay are missing")
    assert refused.stderr.endswith("Run manage.py migrate.\n")


def test_a_plain_table_is_aligned_and_numbers_go_right() -> None:
    out, stream = text_output()
    out.table(["queue", "depth"], [["mail", 1200], ["a", None]], title="Queues")
    assert stream.getvalue().splitlines() == [
        "Queues",
        "queue  depth",
        "-----  -----",
        "mail   1,200",
        "a          -",
    ]


def test_an_empty_table_shows_its_columns() -> None:
    out, stream = text_output()
    out.table(["queue", "depth"], [])
    assert stream.getvalue().splitlines() == ["queue  depth", "-----  -----"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (12345, "12,345"),
        (0.12345, "0.1235"),
        (123456.7, "123,457"),
        ("two\nlines", "two\\nlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\ud800", "\\ud800"),
    ],
)
def test_a_cell_is_one_line_that_no_terminal_obeys(value: object, text: str) -> None:
    assert cell(value) == text


def test_a_line_of_output_stays_one_line_and_loses_control_characters() -> None:
    stream, errors = io.StringIO(), io.StringIO()
    out = Output(stream, errors)
    out.line("one\ntwo\x07")
    out.warn("one\r\x1b[2J")
    assert stream.getvalue() == "one\\ntwo\\x07\n"
    assert errors.getvalue() == "one\\r\\x1b[2J\n"


def test_warnings_go_to_the_error_stream_even_with_json() -> None:
    stream, errors = io.StringIO(), io.StringIO()
    Output(stream, errors, as_json=True).warn("careful")
    assert (stream.getvalue(), errors.getvalue()) == ("", "careful\n")


def test_a_terminal_gets_rich_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out, stream = text_output(Terminal())
    out.table(["queue"], [["[red]mail[/red]"]])
    out.line("bad", "bad")
    assert "[red]mail[/red]" in stream.getvalue(), "a value was read as markup"
    assert "\u2503" in stream.getvalue()
    assert "\x1b[1;31mbad" in stream.getvalue()


@pytest.mark.parametrize("color", [True, False])
def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch, color: bool) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Output(stream, io.StringIO(), color=color).line("bad", "bad")
    assert "31m" not in stream.getvalue()


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out, stream = text_output(Terminal())
    out.line("plain", "bad")
    with out.progress("copying") as tell:
        tell(2, 2)
    assert stream.getvalue() == "plain\ncopying: 2 of 2\n"
