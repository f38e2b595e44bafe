"""The output of a verb: text for people, or JSON for programs.

People get tables and progress bars drawn by rich if it is installed and the output is a terminal,
and plain text otherwise. Values of jobs may contain anything, so characters that control a terminal
are escaped before they are shown.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TextIO

from django.core.serializers.json import DjangoJSONEncoder
from django.utils import translation

from relay_queue import quantities
from relay_queue.logs import printable

if TYPE_CHECKING:
    from rich.console import Console

Style = Literal["good", "bad", "warning", "dim", "title"]

_RICH_STYLES: Final[Mapping[str, str]] = {
    "good": "green",
    "bad": "bold red",
    "warning": "yellow",
    "dim": "dim",
    "title": "bold",
}
# Between the columns of a plain table.
_GAP: Final = "  "
_PLAIN_WIDTH: Final = 80
_MOST_TALL_WIDTH: Final = 120
MOST_NAME_CHARS: Final = 24


class Styled(NamedTuple):
    """A value of a table with a style, which terminals with colours show."""

    value: object
    style: Style


class Output:
    """The writer of a verb. Each method writes in its own mode only.

    In text mode ``line``, ``table``, ``facts`` and ``progress`` write and ``data`` does not; with
    ``as_json`` only ``data`` does. So a verb calls both without asking for the mode. ``warn``
    always writes, to the error stream.
    """

    def __init__(
        self, stream: TextIO, errors: TextIO, *, as_json: bool = False, color: bool = True
    ) -> None:
        """Write to ``stream`` and ``errors``. ``NO_COLOR`` is honoured whatever ``color`` says."""
        self.as_json = as_json
        self._stream = stream
        self._errors = errors
        self._console = None if as_json or not stream.isatty() else _console(stream, color)

    def line(self, text: str = "", style: Style | None = None) -> None:
        """Write one line of text; terminals with colours show its ``style``."""
        if self.as_json:
            return
        if self._console is None:
            self._stream.write(printable(text) + "\n")
        else:
            self._console.print(_rich_text(printable(text), style), soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        title: str = "",
        *,
        tall: Sequence[int] = (),
    ) -> None:
        """Write a table. None is shown as ``-``; columns that hold only numbers go right.

        Tall rows hold sentences, and lists of them, one a line; they are set apart. ``tall`` is
        the share of each column in the width, 0 for one that is as wide as its values. In plain
        text each tall row is a block under the value of its first column.
        """
        if self.as_json:
            return
        values = [list(row) for row in rows]
        if self._console is not None:
            width = min(self._console.width, _MOST_TALL_WIDTH) if tall else None
            table = _rich_table(columns, values, title, tall)
            self._console.print(table, width=width)
            return
        plain = _blocks(columns, values) if tall else _plain_table(columns, values, title)
        for text in plain:
            self._stream.write(text + "\n")

    def facts(self, pairs: Mapping[str, object], title: str = "") -> None:
        """Write names and values, one pair a line."""
        if title:
            self.line(title, "title")
        width = max(map(len, pairs), default=0)
        for name, value in pairs.items():
            self.line(f"{name:<{width}}{_GAP}{cell(value)}")

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """Show how far a long piece of work is; the function it yields takes what is done, and all.

        Plain text shows one line at the end, so that a log file stays readable.
        """
        if self._console is None:
            told: list[tuple[int, int]] = []
            yield lambda done, total: told.append((done, total))
            for done, total in told[-1:]:
                self.line(f"{label}: {done:,} of {total:,}")
            return
        from rich.progress import Progress

        with Progress(console=self._console) as bar:
            task = bar.add_task(printable(label), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def data(self, **values: object) -> None:
        """Write the values by their names as one JSON object, indented, with dates in ISO 8601."""
        if self.as_json:
            self._stream.write(json.dumps(values, cls=DjangoJSONEncoder, indent=2) + "\n")

    def warn(self, text: str) -> None:
        """Write one line to the error stream."""
        self._errors.write(printable(text) + "\n")

    def flush(self) -> None:
        """Write out what is buffered. Raises ``BrokenPipeError`` if the reader has gone."""
        self._stream.flush()

    def abandon(self) -> None:
        """Discard all further output, and what Python flushes when it exits."""
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def cell(value: object) -> str:
    """Return the text of a value in a table: one line, no characters that control a terminal."""
    if isinstance(value, Styled):
        return cell(value.value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return printable(str(value))


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def short(name: str) -> str:
    """Return a name cut to ``MOST_NAME_CHARS``, so that a line fits a terminal."""
    return name if len(name) <= MOST_NAME_CHARS else f"{name[:14]}…{name[-9:]}"


def duration(seconds: float | None) -> str | None:
    """Return a duration as the console shows it; None stays None, which a table shows as ``-``.

    In English, whatever the language of the project: so is all that a verb prints.
    """
    if seconds is None:
        return None
    with translation.override("en"):
        return quantities.duration(seconds)


def _is_numeric(column: int, rows: Sequence[Sequence[object]]) -> bool:
    """Whether a column has numbers, and nothing else but None."""
    kinds = {type(row[column]) for row in rows} - {type(None)}
    return bool(kinds) and kinds <= {int, float}


def _plain_table(columns: Sequence[str], values: list[list[object]], title: str) -> Iterator[str]:
    rows = [[cell(value) for value in row] for row in values]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    numeric = [_is_numeric(number, values) for number in range(len(columns))]
    if title:
        yield printable(title)
    for row in [list(columns), ["-" * width for width in widths], *rows]:
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        yield _GAP.join(cells).rstrip()


def _blocks(columns: Sequence[str], values: list[list[object]]) -> Iterator[str]:
    """Yield each row as a heading and named, wrapped lines, with an empty line between rows."""
    width = max(map(len, columns[1:]))
    for number, (heading, *others) in enumerate(values):
        if number:
            yield ""
        yield cell(heading)
        for name, value in zip(columns[1:], others, strict=True):
            begin = f"{_GAP}{name:<{width}}{_GAP}"
            for line in _lines(value):
                rest = " " * len(begin) + _GAP
                yield from textwrap.wrap(
                    cell(line), _PLAIN_WIDTH, initial_indent=begin, subsequent_indent=rest
                )
                begin = " " * len(begin)


def _lines(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]


def _console(stream: TextIO, color: bool) -> Console | None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    # Rich reads NO_COLOR by itself if the argument is None.
    return Console(file=stream, highlight=False, no_color=None if color else True)


def _rich_text(text: str, style: Style | None) -> Any:
    from rich.text import Text

    # Text, not markup: square brackets in a value are no style.
    return Text(text, style=_RICH_STYLES[style] if style else "")


def _rich_table(
    columns: Sequence[str], values: list[list[object]], title: str, tall: Sequence[int]
) -> Any:
    from rich.table import Table

    heading = _rich_text(title, "title") if title else None
    table = Table(title=heading, title_justify="left", show_lines=bool(tall), expand=bool(tall))
    for number, (name, share) in enumerate(zip_longest(columns, tall)):
        justify: Literal["right", "left"] = "right" if _is_numeric(number, values) else "left"
        table.add_column(name, justify=justify, overflow="fold", ratio=share or None)
    for row in values:
        table.add_row(*map(_rich_cell, row))
    return table


def _rich_cell(value: object) -> Any:
    mark = "- " if isinstance(value, list) else ""
    lines = [
        _rich_text(mark + cell(line), line.style if isinstance(line, Styled) else None)
        for line in _lines(value)
    ]
    return _rich_text("\n", None).join(lines)
