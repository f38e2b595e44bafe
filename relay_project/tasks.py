"""Task functions of the reference project, written the way any project would write its own.

They stand for real work and only take a little time, so that the site can be tried offline.

They sleep where a real function would wait for a mail server, a partner or a processor.
"""

from __future__ import annotations

import math
import random
import time

from relay_queue import RelayContext
from relay_queue.backoff import Backoff
from relay_queue.exceptions import Fatal, Snooze
from relay_queue.task import task

KNOWN_PARTNERS = {"north": 0, "south": 1, "west": 2}
"""How many calls each partner leaves unanswered."""


@task(queue_name="mail")
def send_welcome(address: str) -> str:
    """Send a mail. An address without a domain will not get better: no retry."""
    time.sleep(0.2)  # stands for the mail server
    if "@" not in address:
        raise Fatal(f"{address!r} is no mail address")
    return f"sent to {address}"


@task(takes_context=True, max_attempts=4, backoff=Backoff(0.5, 60.0), retry_on=(ConnectionError,))
def call_partner(context: RelayContext, name: str) -> str:
    """Call an interface that does not always answer. Only a missing answer is worth a retry."""
    time.sleep(0.1)  # stands for the partner's answer
    if context.attempt <= KNOWN_PARTNERS[name]:
        raise ConnectionError(f"{name} did not answer call {context.attempt}")
    return f"{name} answered call {context.attempt}"


@task(max_attempts=5, backoff=Backoff(900.0, 3600.0))
def import_feed(address: str) -> int:
    """Read a feed that is down for now; there is no hurry, so the next try is much later."""
    raise TimeoutError(f"no answer from {address}")


@task(queue_name="reports", max_attempts=2, backoff=Backoff(0.5, 5.0))
def build_report(month: str, columns: list[str]) -> dict[str, int]:
    """Add up the columns of a month."""
    time.sleep(0.3)  # stands for the sums
    lengths = {column: len(month) * len(column) for column in columns}
    return {"columns": len(columns), "mean": sum(lengths.values()) // len(columns)}


@task(takes_context=True, queue_name="reports")
def rebuild_index(context: RelayContext, parts: int, seconds_per_part: float) -> int:
    """Work part by part, and stop between two of them when the job was cancelled."""
    for _ in range(parts):
        context.raise_if_cancelled()
        time.sleep(seconds_per_part)  # stands for the work on a part
    return parts


@task(queue_name="media", timeout_seconds=1.0, max_attempts=1)
def resize_image(name: str, width: int) -> str:
    """Resize an image. Large ones take longer than the timeout, and their result comes too late."""
    time.sleep(width / 1000)  # stands for the work, which grows with the image
    return f"{name} at {width} px"


@task(queue_name="media")
def await_upload(name: str, complete_at: float) -> str:
    """Look whether an upload is complete; if not, look again later without using up an attempt.

    ``complete_at`` is in seconds since the epoch.
    """
    if time.time() < complete_at:
        raise Snooze(1.0)
    return f"{name} is complete"


@task(takes_context=True, queue_name="default", lease_seconds=30.0)
def receive_visitors(context: RelayContext, seconds: float) -> int:
    """Stand for the people who use a site: enqueue a few jobs each second, more at times.

    Returns how many jobs it has enqueued. Cancel it for a quiet site.
    """
    chance = random.Random(context.epoch)
    enqueued = 0
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        context.raise_if_cancelled()
        for _ in range(_visitors(passed, chance)):
            _serve_visitor(chance)
            enqueued += 1
        time.sleep(1.0)  # visitors come second by second
    return enqueued


def _visitors(passed: float, chance: random.Random) -> int:
    """Return how many come in this second: a slow tide, and now and then a newsletter."""
    if chance.random() < 1 / 90:
        return 120
    tide = 2.2 + 1.8 * math.sin(passed / 240)
    return int(tide + chance.random())


def _serve_visitor(chance: random.Random) -> None:
    draw = chance.random()
    if draw < 0.006:
        send_welcome.enqueue("no-domain")
    elif draw < 0.6:
        send_welcome.enqueue(f"reader-{chance.randrange(10_000)}@example.org")
    elif draw < 0.97:
        resize_image.enqueue("harbour.jpg", chance.choice((16, 64, 160, 320, 640)))
    else:
        call_partner.enqueue(chance.choice(list(KNOWN_PARTNERS)))
