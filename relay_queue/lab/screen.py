"""How the demo looks: a live foot line on a terminal, lines with the time of day elsewhere.

At the end it shows what happened in tables, whether the tables hold no fault, and what to try next.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from django.db.models import Count

from relay_queue import clock
from relay_queue.cli.output import Output, Style
from relay_queue.lab.project import counts
from relay_queue.models import Job, Lease
from relay_queue.states import Outcome, State

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PULSE_SECONDS: Final = 0.1
PLAIN_WIDTH: Final = 80
MOST_WIDTH: Final = 100
FACT: Final = "  ok  "

MEANING: Final = {
    Outcome.ACKED: "succeeded",
    Outcome.FAILED: "failed; tried again while attempts were left",
    Outcome.FATAL: "failed for good",
    Outcome.LOST: "the worker died; effect unknown",
    Outcome.EXPIRED: "the worker did not renew; effect unknown",
    Outcome.CANCELLED: "an operator cancelled the job",
}
"""What the outcomes of the demo mean."""


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


# -- the summary


def moment(at: datetime | None) -> str:
    """Return a time of day in UTC, to the millisecond."""
    return f"{at:%H:%M:%S.%f}"[:-3] if at else "-"


def show_summary(out: Output, verified: subprocess.CompletedProcess[str], seconds: float) -> int:
    """Show what came of it all; return 1 if ``relay verify`` found a fault."""
    out.line()
    _jobs(out)
    out.line()
    _attempts(out)
    out.line()
    _refusals(out)
    out.line()
    _verify(out, verified)
    out.line()
    if verified.returncode:
        out.line("NOT OBSERVED: relay verify found faults, see above.", "bad")
        return 1
    out.line(f"All of it was observed, in {seconds:.0f} s.", "good")
    out.line()
    _what_next(out)
    return 0


def _jobs(out: Output) -> None:
    rows = Job.objects.values_list("queue", "state").annotate(n=Count("pk")).order_by()
    found = {(queue, state): n for queue, state, n in rows}
    states = [State(state) for state in counts()]
    queues = sorted({queue for queue, _ in found})
    lines: list[list[object]] = [
        [queue, *(found.get((queue, state), 0) for state in states)] for queue in queues
    ]
    sums = [sum(found.get((queue, state), 0) for queue in queues) for state in states]
    out.table(["queue", *(state.value for state in states)], [*lines, ["(all)", *sums]], "Jobs")


def _attempts(out: Output) -> None:
    rows = Lease.objects.values_list("outcome").annotate(n=Count("pk")).order_by("-n")
    lines = [[outcome, n, MEANING.get(Outcome(outcome), "")] for outcome, n in rows if outcome]
    out.table(["outcome", "attempts", "meaning"], lines, "The ledger")


def _refusals(out: Output) -> None:
    rows = Lease.objects.filter(refused_at__isnull=False).order_by("refused_at")
    lines = [
        [
            lease.job_id,
            lease.attempt,
            moment(lease.refused_at),
            lease.refused_verb,
            lease.refused_reason,
        ]
        for lease in rows
    ]
    out.table(["job", "attempt", "at (UTC)", "verb", "why"], lines, "Late returns, refused")


def _verify(out: Output, verified: subprocess.CompletedProcess[str]) -> None:
    out.line("$ manage.py relay verify", "title")
    for line in (verified.stdout + verified.stderr).splitlines():
        out.line(line, "bad" if verified.returncode else "good")


def _what_next(out: Output) -> None:
    """Show commands that work in the current directory: first what needs nothing.

    The others look at the project's own database, which the demo has not touched.
    """
    here, python = Path.cwd(), Path(sys.executable)
    program = str(python.relative_to(here)) if python.is_relative_to(here) else "python"
    relay = f"{program} manage.py relay"
    now: dict[str, object] = {f"{relay} --help": "all that relay can do"}
    maker = f"{program} manage.py migrate"
    if (here / "relay_project" / "serve.py").exists():
        maker = "make serve"
        now = {maker: "the admin and a worker", **now}
    later: dict[str, object] = {
        f"{relay} status": "queues, workers, dead letters",
        f"{relay} doctor": "what is set up, and what is wrong",
        f"{program} manage.py runworker": "one more worker",
    }
    out.facts(now, title="What to try next")
    out.line()
    out.facts(later, title=f"Once {maker} has made the database, in another terminal")
