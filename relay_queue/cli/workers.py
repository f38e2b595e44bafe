"""What the verbs about workers share: which are meant, and telling them something."""

from __future__ import annotations

import argparse

from django.core.management.base import CommandError

from relay_queue import conf, store
from relay_queue.cli.base import Output, add_json
from relay_queue.cli.output import short
from relay_queue.models import Worker, WorkerOrder
from relay_queue.store.bounds import is_storable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the workers that are meant."""
    add_json(parser)
    parser.add_argument("workers", metavar="WORKER", nargs="*", help="Names or ids of workers.")
    parser.add_argument("--all", action="store_true", help="Every worker that has not ended.")


def tell(options: argparse.Namespace, order: WorkerOrder | None, done: str, out: Output) -> int:
    """Give an order to the workers that are meant; return 1 if one of them could not take it."""
    worker_ids = _chosen(options)
    with store.transaction() as tx:
        told = store.order_workers(tx, worker_ids, order)
    passed = sorted(set(worker_ids) - set(told))
    out.data({"told": told, "passed_over": passed})
    out.line(f"{done}: {_listed(told)}. They obey within about a second.")
    if passed:
        out.line(f"Ended, or told to stop, already: {_listed(passed)}.", "warning")
    return 1 if passed else 0


def _chosen(options: argparse.Namespace) -> list[int]:
    """Return the ids of the workers that are meant. Raises ``CommandError`` if that is unclear."""
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
