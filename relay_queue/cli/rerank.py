"""``relay rerank``: change how fast the jobs of a queue age."""

from __future__ import annotations

import argparse

from relay_queue import store
from relay_queue.cli import queues
from relay_queue.cli.base import Output, add_json
from relay_queue.ranking import MAX_AGING_SECONDS, MIN_AGING_SECONDS

HELP = (
    "Change how many seconds of waiting are worth one priority class in a queue, and rewrite the "
    "order of its unfinished jobs, in small transactions beside live workers."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
    queues.add_argument(parser)
    parser.add_argument(
        "--aging-seconds",
        metavar="N",
        type=_aging,
        required=True,
        help="Seconds worth one class; or strict: a lower class never goes before a higher one.",
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Rerank the queue."""
    queue = queues.check(options.queue)
    aging_seconds = None if options.aging_seconds == "strict" else options.aging_seconds
    jobs = store.rerank(queue, aging_seconds)
    out.data({"queue": queue, "aging_seconds": aging_seconds, "jobs": jobs})
    how = "strict priority" if aging_seconds is None else f"{aging_seconds:g} s a class"
    out.line(f"Queue {queue} now has {how}; {jobs:,} jobs were given their new rank.")
    return 0


def _aging(text: str) -> float | str:
    if text == "strict":
        return text
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor strict") from None
    if not MIN_AGING_SECONDS <= seconds <= MAX_AGING_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {MIN_AGING_SECONDS:g} and {MAX_AGING_SECONDS:,.0f} seconds"
        )
    return seconds
