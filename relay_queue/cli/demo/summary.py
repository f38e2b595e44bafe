"""The end of the demo: what happened in tables, whether the books are right, what to try next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from django.db.models import Count

from relay_queue.cli.demo.stage import counts, moment
from relay_queue.cli.output import Output
from relay_queue.models import Job, Lease
from relay_queue.states import Outcome, State

MEANING = {
    Outcome.ACKED: "succeeded",
    Outcome.FAILED: "failed; tried again while attempts were left",
    Outcome.FATAL: "failed for good",
    Outcome.LOST: "the worker died; effect unknown",
    Outcome.EXPIRED: "the worker did not renew; effect unknown",
    Outcome.CANCELLED: "an operator cancelled the job",
}
"""What the outcomes of the demo mean."""


def show(out: Output, seconds: float) -> int:
    """Show it all; return 1 if ``relay verify`` found a fault."""
    out.line()
    _jobs(out)
    out.line()
    _attempts(out)
    out.line()
    _refusals(out)
    out.line()
    code = _verify(out)
    out.line()
    if code:
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


def _verify(out: Output) -> int:
    """Run the real command, as anybody would, and show what it says."""
    out.line("$ manage.py relay verify", "title")
    done = subprocess.run(
        [sys.executable, "-m", "django", "relay", "verify"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        out.line(line, "bad" if done.returncode else "good")
    return done.returncode


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
