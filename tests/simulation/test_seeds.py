"""The store keeps its promises in every seed; a seed is the same history every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.simulation.play import Played, play
from tests.simulation.scratch import Scratch

SEEDS = 2000
CHUNK = 100
"""Seeds a test: several tests, so that they spread over the processes of the suite."""

TORTURE_SEEDS = int(os.environ.get("RELAY_TORTURE_SEEDS", "50000"))
REPLAYED = 3


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(CHUNK, SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(database: Scratch, first: int) -> None:
    assert len(list(search(database, first, CHUNK))) == CHUNK


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_no_seed_of_very_many_breaks_a_promise(database: Scratch) -> None:
    assert sum(1 for _ in search(database, SEEDS, TORTURE_SEEDS)) == TORTURE_SEEDS


def search(database: Scratch, first: int, count: int) -> Iterator[Played]:
    """Play seeds until one fails."""
    for seed in range(first, first + count):
        played = play(seed, database)
        assert not played.violations, played.report()
        yield played


def test_the_first_seeds_break_no_promise_and_meet_every_kind_of_change_and_fault(
    database: Scratch,
) -> None:
    played = list(search(database, 0, CHUNK))
    outcomes = {lease.outcome for p in played for lease in p.seen.ledger.leases.values()}
    assert outcomes == {
        *("acked", "failed", "fatal", "timed_out", "expired", "lost"),
        *("released", "snoozed", "cancelled"),
    }
    steps = {(c.old, c.new) for p in played for c in p.seen.ledger.changes if c.kind == "job"}
    assert {("dead", "ready"), ("cancelled", "ready"), ("dead", "deleted")} <= steps
    records = [record for p in played for record in p.seen.records]
    faults = {record["phase"] for record in records if record["kind"] == "fault"}
    assert faults == {"death", "pause", "clock", "rival", "full", "unknown"}
    for kind in ("enqueue", "settle", "operate"):
        fates = {r["phase"] for r in records if r["kind"] == kind}
        assert {"nothing", "unknown"} <= fates
    assert any(r["kind"] == "busy" for r in records)
    refused = [r for r in records if r.get("accepted") is False]
    assert len(refused) > 100
    assert {p.seen.steady for p in played} == {True, False}


def test_a_seed_is_the_same_history_again_in_any_process(database: Scratch) -> None:
    for seed in range(REPLAYED):
        here = play(seed, database).digest
        assert play(seed, database).digest == here
        assert {replayed_elsewhere(seed, hash_seed) for hash_seed in ("1", "2")} == {here}


def replayed_elsewhere(seed: int, hash_seed: str) -> str:
    """Play a seed in a process of its own, and return the hash of its history."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("history ")]
    return line.split()[1]


def test_different_seeds_are_different_histories(database: Scratch) -> None:
    assert len({play(seed, database).digest for seed in range(20)}) == 20
