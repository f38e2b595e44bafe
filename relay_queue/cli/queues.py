"""What the verbs about one queue share: its name as an argument, checked before it is used."""

from __future__ import annotations

import argparse

from django.core.management.base import CommandError

from relay_queue import conf
from relay_queue.models import Queue


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the name of a queue."""
    parser.add_argument("queue", metavar="QUEUE", help="Name of the queue.")


def check(name: str) -> str:
    """Return the name if there is such a queue.

    The store makes a queue on first use, but a verb of an operator that meets an unknown name has
    met a typing error. Raises ``CommandError`` with the known names.
    """
    known = set(Queue.objects.using(conf.get().database).values_list("name", flat=True))
    known |= set(conf.get().queues or ())
    if name not in known:
        names = f"The queues are {', '.join(sorted(known))}." if known else "There is none yet."
        raise CommandError(f"there is no queue {name!r}. {names}")
    return name
