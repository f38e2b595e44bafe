"""The verbs that give orders to workers: quiet and stop. Made from the table of operations."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final

from django.core.management.base import CommandError

from relay_queue import conf, store
from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import short
from relay_queue.models import Worker
from relay_queue.operations import WORKER_OPERATIONS, WorkerOperation
from relay_queue.states import WorkerOrder
from relay_queue.validation import is_storable


@dataclass(frozen=True, slots=True)
class WorkerVerb:
    """The verb of an order to workers; see `relay_queue.cli.base.Verb`."""

    operation: WorkerOperation

    @property
    def HELP(self) -> str:  # noqa: N802 - a module that is a verb has a constant of this name
        """The help of the verb."""
        return self.operation.help

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the names or ids of workers, and ``--all``."""
        add_json(parser)
        parser.add_argument("workers", metavar="WORKER", nargs="*", help="Names or ids of workers.")
        parser.add_argument("--all", action="store_true", help="Every worker that has not ended.")
        if self.operation.undo is not None:
            parser.add_argument("--undo", action="store_true", help="Let them claim again.")

    def run(self, options: argparse.Namespace, out: Output) -> int:
        """Give the order to the chosen workers; return 1 if one of them could not take it."""
        undo = self.operation.undo
        operation = undo if undo is not None and options.undo else self.operation
        worker_ids = _chosen(options)
        with store.transaction() as tx:
            obeying = store.order_workers(tx, worker_ids, operation.order)
        passed = sorted(set(worker_ids) - set(obeying))
        out.data({"told": obeying, "passed_over": passed})
        out.line(f"{operation.done}: {_listed(obeying)}. They obey within about a second.")
        if passed:
            out.line(f"Ended, or told to stop, already: {_listed(passed)}.", "warning")
        return 1 if passed else 0


VERBS: Final = {op.command: WorkerVerb(op) for op in WORKER_OPERATIONS if op.command}
"""The verbs by their names."""


def _chosen(options: argparse.Namespace) -> list[int]:
    """Return the ids of the chosen workers. Raises ``CommandError`` if the choice is unclear."""
    if bool(options.workers) == options.all:
        raise CommandError("Name workers, or say --all. relay status lists them.")
    rows = Worker.objects.using(conf.get().database)
    if options.all:
        live = rows.filter(stopped_at=None).exclude(ordered=WorkerOrder.STOP)
        return list(live.order_by("id").values_list("id", flat=True))
    return list(dict.fromkeys(_find(text) for text in options.workers))


def _find(text: str) -> int:
    rows = Worker.objects.using(conf.get().database)
    named = rows.filter(name=text) if is_storable(text) else rows.none()
    live = named.filter(stopped_at=None).order_by("id")
    found = list(live.values_list("id", flat=True))
    if len(found) > 1:
        ids = ", ".join(map(str, found))
        raise CommandError(
            f"{len(found)} workers have the name {text!r}; name one by its id: {ids}."
        )
    if not found and text.isascii() and text.isdigit() and len(text) <= 18:
        found = list(rows.filter(pk=int(text)).values_list("id", flat=True))
    if not found:
        raise CommandError(f"there is no worker {text!r}. relay status lists them.")
    return found[0]


def _listed(worker_ids: list[int]) -> str:
    rows = Worker.objects.using(conf.get().database).filter(pk__in=worker_ids).order_by("id")
    return ", ".join(f"{short(row.name)} (id {row.pk})" for row in rows) or "nobody"
