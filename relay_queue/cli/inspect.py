"""``relay inspect``: the content of the log, the file and the tables; or the story of one job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from django.db import connections

from relay_queue import conf
from relay_queue.cli.base import Verb, whole_number
from relay_queue.cli.output import Output, duration, short
from relay_queue.db.filename import database_path
from relay_queue.db.wal import WalReport, read_wal_in_child
from relay_queue.models import Job, Lease
from relay_queue.query import ledger, server, status
from relay_queue.query.ledger import Story, counted, shown_token
from relay_queue.states import State

PRAGMAS: Final = ("page_size", "page_count", "freelist_count", "journal_mode", "encoding")


def _add_job(parser: argparse.ArgumentParser) -> None:
    text = "Tell the story of this job."
    parser.add_argument("--job", metavar="ID", type=whole_number, help=text)


def _inspect(options: argparse.Namespace, out: Output) -> None:
    """Show what is in the write-ahead log, the database file, the tables and the ledger; or with
    --job, every attempt of one job and how often it can have run.
    """
    if options.job is None:
        _show_everything(out)
    else:
        _show_story(ledger.story(options.job), out)


def _show_everything(out: Output) -> None:
    path = database_path(conf.get().database)
    # Before any connection: opening the database would repair the end of its log.
    log = None if path is None else read_wal_in_child(path)
    file = None if path is None else _file_facts(path)
    found = server.read_server()
    tables = None if found is None else server.table_sizes()
    standing = status.read_status()
    queues = {queue.name: queue.counts for queue in standing.queues}
    totals = ledger.ledger_totals()
    out.data(
        file=file,
        log=log and asdict(log),
        server=found and asdict(found),
        tables=tables,
        jobs=queues,
        ledger=totals.outcomes,
        refused=totals.refused,
        verdicts=standing.verdicts,
    )
    if file is not None and log is not None:
        out.facts(file, "Database file")
        out.line()
        out.facts(_log_facts(log), "Write-ahead log")
        out.line()
    if found is not None and tables is not None:
        _show_server(found, tables, out)
    _show_jobs(queues, out)
    out.line()
    out.table(["leases", "outcome"], [[n, name] for name, n in totals.outcomes.items()], "Ledger")
    out.line(f"late returns, refused: {totals.refused:,}")
    out.line()
    rows = [[n, str(verdict.label)] for verdict, n in standing.verdicts.items() if n]
    out.table(["jobs", "verdict"], rows, "Verdicts")


def _file_facts(path: str) -> dict[str, Any]:
    return {"path": path, "size_bytes": os.stat(path).st_size, **pragmas(PRAGMAS)}


def pragmas(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of pragmas of the queue's database by their names."""
    values = {}
    with connections[conf.get().database].cursor() as cursor:
        for name in names:
            cursor.execute(f"PRAGMA {name}")
            values[name] = cursor.fetchone()[0]
    return values


def _show_server(found: server.Server, tables: dict[str, dict[str, Any]], out: Output) -> None:
    """Show the version and the tables of a server, whose file and log cannot be read."""
    out.facts({"server": found.version, "size_bytes": found.size_bytes}, "Database server")
    out.line()
    rows = [
        [fact["rows"], fact["dead_rows"], fact["size_bytes"], name] for name, fact in tables.items()
    ]
    out.table(["rows", "dead rows", "bytes", "table"], rows, "Tables (estimates of the server)")
    out.line()


def _log_facts(log: WalReport) -> dict[str, Any]:
    if not log.exists:
        return {"log": "none: everything is in the database file"}
    header = "sound" if log.header_ok else "none" if not log.size_bytes else "damaged"
    return {
        "size_bytes": log.size_bytes,
        "header": header,
        "page_size": log.page_size_bytes,
        "frames": log.frames,
        "commits": log.commits,
        "uncommitted frames": log.uncommitted_frames,
        "tail": f"{log.tail}: {log.tail_reason}" if log.tail_reason else log.tail,
    }


def _show_jobs(queues: dict[str, dict[str, int]], out: Output) -> None:
    rows = [
        [state.value, short(name), counts[state]]
        for state in State
        for name, counts in queues.items()
        if counts.get(state)
    ]
    out.table(["state", "queue", "jobs"], rows, "Jobs")


def _show_story(story: Story, out: Output) -> None:
    out.data(**_story_as_data(story))
    job = story.job
    out.facts(
        {
            "job": str(job.id),
            "task": job.task,
            "queue": job.queue,
            "state": job.state,
            "attempts": f"{job.attempt - job.attempt_base} of {job.max_attempts} in this budget, "
            f"{job.attempt} in all",
            "created": _when(job.created_at),
            "available": _when(job.available_at),
            "finished": _when(job.finished_at),
            "key": job.idempotency_key,
            "last error": job.last_error or None,
            "verdict": str(story.verdict.label),
            "because": story.detail,
        }
    )
    if story.older:
        out.line()
        out.line(f"The newest {len(story.leases)} attempts; {counted(story.older)} older ones.")
    for lease in story.leases:
        out.line()
        _show_lease(lease, out)


def _show_lease(lease: Lease, out: Output) -> None:
    worker = lease.worker if lease.worker_id else None
    facts = {
        "token": f"{shown_token(lease.token)}…",
        "worker": str(worker) if worker else lease.worker_id and f"id {lease.worker_id}",
        "granted": _when(lease.acquired_at),
        "renewed": _when(lease.renewed_at),
        "expires": _when(lease.expires_at),
        "ended": _ended(lease),
        "error": lease.error or None,
    }
    if lease.refused_at:
        facts["refused"] = (
            f"{_when(lease.refused_at)}, a late {lease.refused_verb}: {lease.refused_reason}"
        )
    title = f"Attempt {lease.attempt}, lease {lease.id}: {lease.outcome or 'open'}"
    out.facts({name: value for name, value in facts.items() if value is not None}, title)


def _ended(lease: Lease) -> str | None:
    if lease.ended_at is None:
        return None
    lasted = (lease.ended_at - lease.acquired_at).total_seconds()
    return f"{_when(lease.ended_at)}, after {duration(lasted)}"


def _when(moment: Any) -> str | None:
    return None if moment is None else f"{moment:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _story_as_data(story: Story) -> dict[str, Any]:
    hidden = {"payload", "result"}
    leases = []
    for lease in story.leases:
        worker = str(lease.worker) if lease.worker_id and lease.worker else None
        # A reader of the whole token could settle the job.
        leases.append(_columns(lease) | {"token": shown_token(lease.token), "worker": worker})
    return {
        "job": {name: value for name, value in _columns(story.job).items() if name not in hidden},
        "leases": leases,
        "older_leases": story.older,
        "verdict": str(story.verdict.label),
        "detail": story.detail,
    }


def _columns(row: Job | Lease) -> dict[str, Any]:
    return {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}


VERBS: Final = {"inspect": Verb(_inspect, _add_job)}
"""The verb by its name."""
