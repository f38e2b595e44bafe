"""How the demo looks: a live foot line on a terminal, lines with the time of day elsewhere."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from relay_queue import clock
from relay_queue.cli.output import Output, Style

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PULSE_SECONDS: Final = 0.1
PLAIN_WIDTH: Final = 80
MOST_WIDTH: Final = 100
FACT: Final = "  ok  "


class Screen:
    """Shows scenes and facts as they come. A context manager: its end takes the foot line away."""

    def __init__(self, out: Output, *, color: bool = True) -> None:
        self.out = out
        self._console = _console(color)
        self._live: Live | None = None
        self._pulse_at = 0.0
        self._doing = ""

    def __enter__(self) -> Self:
        if self._console is not None:
            from rich.live import Live

            self._live = Live(console=self._console, transient=True, refresh_per_second=12)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def scene(self, number: int, of: int, title: str) -> None:
        """Begin scene ``number`` of so many."""
        self.say()
        self.say(f"{number}/{of}  {title}", "title")
        self.doing(title)

    def fact(self, text: str) -> None:
        """Show something that was observed."""
        self._wrapped(FACT, text, "good", None)

    def note(self, text: str) -> None:
        """Show what is going on."""
        self._wrapped(" " * len(FACT), text, None, "dim")

    def say(self, text: str = "", style: Style | None = None) -> None:
        """Show one line."""
        self._write("", text, None, style)

    def doing(self, text: str) -> None:
        """Name what the foot line says is being done."""
        self._doing = text
        self._draw({})

    def pulse(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Refresh the foot line if it is time; only then is ``counts`` called."""
        now = time.monotonic()
        if self._live is not None and now >= self._pulse_at:
            self._pulse_at = now + PULSE_SECONDS
            self._draw(counts())

    def _draw(self, counts: Mapping[str, int]) -> None:
        if self._live is None or self._console is None:
            return
        from rich.spinner import Spinner
        from rich.text import Text

        jobs = ", ".join(f"{n} {state}" for state, n in counts.items())
        text = Text(f" {jobs or self._doing}", style="dim", no_wrap=True, overflow="ellipsis")
        kind = "dots" if self._console.encoding.startswith("utf") else "line"
        if isinstance(shown := self._live.renderable, Spinner):
            shown.update(text=text)
        else:
            self._live.update(Spinner(kind, text))

    def _wrapped(self, mark: str, text: str, mark_style: Style | None, style: Style | None) -> None:
        width = PLAIN_WIDTH - len(_stamp())
        if self._console is not None:
            width = min(self._console.width, MOST_WIDTH)
        # A number and its unit stay on one line.
        text = re.sub(r"(?<=\d) (?=m?s\b)", "\xa0", text)
        for line in textwrap.wrap(text, width - len(mark), break_on_hyphens=False):
            self._write(mark, line.replace("\xa0", " "), mark_style, style)
            mark = " " * len(mark)

    def _write(self, mark: str, text: str, mark_style: Style | None, style: Style | None) -> None:
        if self._console is None:
            self.out.line((_stamp() + mark + text).rstrip())
            return
        from rich.text import Text

        styles = {"good": "green", "bad": "bold red", "dim": "dim", "title": "bold"}
        line = Text(mark, style=styles.get(mark_style or "", ""))
        line.append(text, style=styles.get(style or "", ""))
        self._console.print(line, soft_wrap=True)


def _stamp() -> str:
    return f"{clock.now():%H:%M:%S}  "


def _console(color: bool) -> Console | None:
    """Return a console if standard output is a terminal that can be drawn on and rich is there."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    options: dict[str, Any] = {} if color else {"no_color": True}
    console = Console(highlight=False, **options)
    return None if console.is_dumb_terminal else console
