"""The verbs that keep a database in order: verify, recover, prune and backup."""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Final

from django.core.management.base import CommandError
from django.db import connections

from relay_queue import conf, store
from relay_queue.cli.base import Verb, add_states, duration_argument, flag
from relay_queue.cli.output import Output, counted, short
from relay_queue.db.filename import database_path
from relay_queue.query import looks, prunable
from relay_queue.query.verify import verify
from relay_queue.query.verify_rules import Fault
from relay_queue.states import State
from relay_queue.store.dialects import dialect_for
from relay_queue.store.operate import BATCH
from relay_queue.store.records import Recovered
from relay_queue.worker.database import in_one_line
from relay_queue.worker.liveness import CONFIRM_SECONDS, DeadWorkers

SHOWN: Final = 20
"""Faults of one kind, and jobs, that are shown; ``--json`` has all."""

NO_WORKER: Final = 0  # No row has this id, so every registered worker is examined.

LOCKED_SECONDS = 60.0
"""Seconds that a copy waits for a locked database."""


# -- verify


def _verify(options: argparse.Namespace, out: Output) -> int:
    """Check the write-ahead log, the database file, the checksums of all payloads, the ledger of
    attempts and the counters. Reads only, and may run beside live workers. Exits with 1 on any
    fault.
    """
    path = database_path(conf.get().database)
    with out.progress("jobs checked") as tell:

        def progress(what: str, done: int, total: int) -> None:
            if what == "jobs":
                tell(done, total)

        found = verify(path, progress=progress)
    faults = [asdict(fault) | {"advice": fault.advice} for fault in found.faults]
    out.data(**{"ok": found.ok} | asdict(found) | {"faults": faults})
    for note in found.notes:
        out.line(f"note: {note}", "dim")
    for kind, of_kind in groupby(sorted(found.faults, key=lambda f: f.kind), lambda f: f.kind):
        _show_kind(kind, list(of_kind), out)
    jobs = counted(found.jobs, "job")
    if found.ok:
        out.line(f"No fault in {jobs}.", "good")
        return 0
    out.line()
    out.line(f"{counted(found.fault_count, 'fault')} in {jobs}.", "bad")
    return 1


def _show_kind(kind: str, faults: list[Fault], out: Output) -> None:
    out.line()
    out.line(f"{kind} ({len(faults):,})", "bad")
    for fault in faults[:SHOWN]:
        out.line(f"  {fault.message}")
    if len(faults) > SHOWN:
        out.line(f"  and {len(faults) - SHOWN:,} more; --json lists them")
    out.line(f"  What to do: {faults[0].advice}")


# -- recover


def _add_recount(parser: argparse.ArgumentParser) -> None:
    text = "Also set the counters of every queue to what its jobs are; holds the writer."
    flag(parser, "--recount", help=text)


def _recover(options: argparse.Namespace, out: Output) -> int:
    """End the leases of workers that are proven dead, and those that have expired, and send their
    jobs on. Workers do this by themselves; this is for when none runs.
    """
    connection = connections[conf.get().database]
    dialect_for(connection).read_anything(connection)
    trial = store.Trial()
    dead, lost = _recover_dead(trial)
    ended = lost + _recover_expired(trial)
    recounted = _recount() if options.recount else []
    recovered = [one._asdict() for one in ended]
    out.data(dead_workers=dead, recounted_queues=recounted, recovered=recovered)
    if recounted:
        out.line(f"Counted anew: {', '.join(recounted)}.")
    out.line(f"Workers found dead: {len(dead)}. Leases ended: {len(ended):,}.")
    if ended:
        counts = Counter((one.queue, one.outcome, one.state) for one in ended)
        rows = [[short(queue), *went, n] for (queue, *went), n in sorted(counts.items())]
        out.table(["queue", "lease", "job went to", "jobs"], rows)
        ids = ", ".join(str(one.job_id) for one in ended[:SHOWN])
        out.line(f"Jobs: {ids}" + (" and more" if len(ended) > SHOWN else ""))
    for step, error in trial.faults.items():
        why = in_one_line(error)
        out.warn(f"Cannot {step}: {why}. What is left stays as it is: see relay doctor.")
    return 1 if trial.faults else 0


def _recover_dead(trial: store.Trial) -> tuple[list[int], list[Recovered]]:
    """End the leases of dead workers; return the workers' ids and the leases."""
    siblings = DeadWorkers()
    ended: list[Recovered] = []
    try:
        _find(siblings)
        dead = sorted(siblings.probes)
        while siblings.probes:
            with store.transaction() as tx:
                batch = siblings.recover(tx, trial=trial)
            siblings.forget()
            ended += batch
            if trial.faults and not batch:
                break  # the other leases, and with them the rows of their workers, have to wait
    finally:
        siblings.close()
    return dead, ended


def _find(siblings: DeadWorkers) -> None:
    """Find the dead workers; a session whose lock is free is examined a second time."""
    siblings.find(conf.get().database, NO_WORKER, watched=inf)
    if siblings.suspects:
        time.sleep(CONFIRM_SECONDS)  # a free session lock must be seen twice
        siblings.find(conf.get().database, NO_WORKER, watched=inf)


def _recount() -> list[str]:
    """Set the counters of all queues, each in a transaction of its own; return their names."""
    queues = looks.read_queues().queues
    for queue in queues:
        with store.transaction() as tx:
            store.recount(tx, queue)
    return queues


def _recover_expired(trial: store.Trial) -> list[Recovered]:
    ended: list[Recovered] = []
    while True:
        with store.transaction() as tx:
            batch = store.recover_expired(tx, BATCH, trial=trial)
        ended += batch
        # A trial may also mark unreadable jobs, which are not among those that ended.
        if not batch:
            return ended


# -- prune

STATES: Final = [state.value for state in (State.SUCCEEDED, State.CANCELLED, State.DEAD)]

_OTHERS: Final = {
    "workers": store.prune_workers,
    "minutes": store.prune_minutes,
    "bulk_acts": store.prune_bulk_acts,
    "runs": store.prune_runs,
}
"""What is pruned besides jobs. Each kind, and each state, has a setting ``RETAIN_…_SECONDS``."""


def _add_what_to_prune(parser: argparse.ArgumentParser) -> None:
    text = "Finished longer ago than 7d, 12h, 30m or 45s; default: the RETAIN_ setting."
    parser.add_argument("--older-than", metavar="AGE", type=_age, help=text)
    add_states(parser, STATES)
    flag(parser, "--dry-run", help="Show how many rows would go, and delete nothing.")


def _age(text: str) -> float:
    seconds = duration_argument(text)
    n = text.strip()
    if not n[-1].isalpha():
        # Whoever types 30 mostly means days, and what is deleted does not come back.
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name its unit. Write {n}d, {n}h, {n}m or {n}s."
        )
    return seconds


def _prune(options: argparse.Namespace, out: Output) -> None:
    """Delete finished jobs with their ledger, at most a thousand a transaction. Without arguments,
    what the RETAIN_ settings no longer keep, old statistics, bulk acts and stopped workers
    included. Dead letters go only with --state dead or a setting.
    """
    now = looks.now()
    act = prunable.count if options.dry_run else _delete
    rows = {
        kind: act(kind, now - timedelta(seconds=seconds))
        for kind, seconds in _ages(options.state, options.older_than).items()
    }
    out.data(**{"would_delete" if options.dry_run else "deleted": rows})
    if not rows:
        out.line("Nothing is to be deleted: the settings keep these for ever. Name --older-than.")
    words = "would be deleted" if options.dry_run else "deleted"
    for kind, n in rows.items():
        out.line(f"{kind}: {n:,} {words}")


def _ages(states: list[str] | None, older_than: float | None) -> dict[str, float]:
    """Return the age in seconds from which rows of each kind are deleted."""
    settings = conf.get()
    ages = {}
    for kind in states or [*STATES, *_OTHERS]:
        kept = getattr(settings, f"retain_{kind}_seconds")
        # Dead letters that are kept for ever are deleted only if they are named.
        if older_than is not None and kind in STATES and (states or kept is not None):
            kept = older_than
        if kept is not None:
            ages[kind] = kept
    return ages


def _delete(kind: str, before: datetime) -> int:
    """Delete all old rows of a kind, in bounded bites; return how many."""
    total, more = 0, True
    while more:
        with store.transaction() as tx:
            if kind in _OTHERS:
                n = _OTHERS[kind](tx, before, BATCH)
                more = n == BATCH
            else:
                n, more = store.prune(tx, State(kind), before, BATCH)
        total += n
    return total


# -- backup


def _add_destination(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("destination", metavar="DEST", type=Path, help="The file to make.")


def _backup(options: argparse.Namespace, out: Output) -> None:
    """Copy the SQLite database to a new file while it is in use, check the copy, and only then give
    it its name. Never overwrites.
    """
    destination: Path = options.destination.absolute()
    alias = conf.get().database
    if database_path(alias) is None:
        raise CommandError(
            f"the database {alias!r} has no file of its own to copy. For a database server use its "
            "own tool, pg_dump for PostgreSQL."
        )
    if destination.exists():
        raise CommandError(f"{destination} exists. Name a file that does not; none is overwritten.")
    if not destination.parent.is_dir():
        raise CommandError(f"{destination.parent} is no directory. Make it, or name another.")
    try:
        jobs = _back_up(alias, destination)
    except (OSError, sqlite3.Error) as error:
        raise CommandError(f"the backup failed and left nothing behind: {error}") from error
    size = destination.stat().st_size
    out.data(path=str(destination), size_bytes=size, jobs=jobs)
    out.line(f"{destination}: {size:,} bytes, {jobs:,} jobs, integrity checked", "good")


def _back_up(alias: str, destination: Path) -> int:
    """Copy, check and name the file; return how many jobs it holds.

    Only its maker may read the copy, as ``mkstemp`` makes it: it holds everything that the database
    does, and its directory may be open to others.
    """
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", dir=destination.parent)
    os.close(handle)
    partial = Path(name)
    try:
        jobs = _copy(alias, partial)
        _name(partial, destination)
    finally:
        for leftover in (partial, *(Path(f"{name}{suffix}") for suffix in ("-wal", "-shm"))):
            leftover.unlink(missing_ok=True)
    return jobs


def _copy(alias: str, target: Path) -> int:
    """Copy in one step, which is one snapshot, while writers go on."""
    connection = connections[alias]
    connection.ensure_connection()
    with closing(sqlite3.connect(target)) as copy:
        connection.connection.backup(copy, progress=_patience())
        # Then the copy is one file, complete without a log beside it.
        copy.execute("PRAGMA journal_mode = DELETE")
        ((verdict,),) = copy.execute("PRAGMA integrity_check(1)").fetchall()
        if verdict != "ok":
            raise sqlite3.DatabaseError(
                f"the copy is damaged: {verdict}. So is the original: run relay verify."
            )
        return int(copy.execute("SELECT count(*) FROM relay_queue_job").fetchone()[0])


def _patience() -> Callable[[int, int, int], None]:
    """Return the callback of each try; without it a copy would wait for a lock for ever."""
    deadline = time.monotonic() + LOCKED_SECONDS

    def check(status: int, _remaining: int, _total: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and time.monotonic() > deadline:
            raise TimeoutError(f"the database was locked for {LOCKED_SECONDS:g} s; try again")

    return check


def _name(partial: Path, destination: Path) -> None:
    """Give the finished file its name. Raises ``FileExistsError`` if another file has it."""
    try:
        os.link(partial, destination)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links. A rename would overwrite, so check once more.
        if destination.exists():
            raise FileExistsError(f"{destination} exists") from None
        partial.rename(destination)
    _sync(destination.parent)


def _sync(directory: Path) -> None:
    """Make the name survive a power failure, where directories can be synced."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


VERBS: Final = {
    "verify": Verb(_verify),
    "recover": Verb(_recover, _add_recount),
    "prune": Verb(_prune, _add_what_to_prune),
    "backup": Verb(_backup, _add_destination),
}
"""The verbs by their names."""
