"""Bench measures beside bare SQLite, judges by the bars, and leaves nothing behind.

No test here asserts a speed: on a busy machine every bar may be missed.
"""

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import CommandError

from relay_queue.lab.bench import runner, throughput
from relay_queue.lab.bench.figures import Bar, judge, names_for, percentile
from relay_queue.lab.processes import LabError, wait_for
from tests import postgresql
from tests.conftest import Project, processes_with, wait_until

Relay = Callable[..., Any]
KEYS = {"name", "value", "unit", "baseline", "ratio", "bar", "ok"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Send temporary files to a folder; at the end no process of bench may be left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    wait_until(lambda: not processes_with(f"TMPDIR={tmp_path}"), message="bench left processes")


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the figures that bench is going to find."""

    def can(*figures: Mapping[str, Any]) -> None:
        found = {figure["name"]: figure for figure in figures}

        def measure(family: str, names: list[str], *_: Any, **__: Any) -> Iterator[Any]:
            yield from (found[name] for name in names)

        monkeypatch.setattr(runner, "measure", measure)

    return can


# -- real runs


@pytest.mark.thorough
def test_real_run_reports_each_figure_beside_its_baseline(relay: Relay, folder: Path) -> None:
    answer = relay("bench", "--quick", "--json", "--only", "fair_share", "enqueue_one")
    figures = {figure["name"]: figure for figure in answer.data["figures"]}
    assert list(figures) == ["fair_share", "enqueue_one"]
    for figure in figures.values():
        assert set(figure) >= KEYS
        assert figure["fault"] == ""
        assert figure["value"] > 0
        assert figure["ratio"] == pytest.approx(figure["value"] / figure["baseline"], rel=0.01)
    assert len(figures["fair_share"]["context"]["shares"]) == throughput.PROCESSES
    assert answer.code == (0 if all(figure["ok"] for figure in figures.values()) else 1)
    facts = answer.data["machine"]
    assert {"python", "django", "sqlite", "cpus", "cpu_model", "filesystem"} <= set(facts)
    assert facts["fsync_p50_us"] > 0
    assert list(folder.iterdir()) == []


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_quick_run_measures_every_figure(relay: Relay, folder: Path) -> None:
    figures = relay("bench", "--quick", "--json").data["figures"]
    assert [figure["name"] for figure in figures] == names_for("sqlite")
    assert [figure for figure in figures if figure["value"] is None] == []


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_quick_run_on_postgresql_measures_every_figure_of_it(tmp_path: Path) -> None:
    folder = postgresql.make_folder()
    server = postgresql.Server(folder, durable=True)
    server.start()
    try:
        address = server.create("project", "template0")
        project = Project(address, tmp_path)
        done = project.manage("relay", "bench", "--quick", "--json", check=False, timeout=500)
        figures = json.loads(done.stdout)["figures"]
        with server.connect() as connection:
            left = connection.execute("SELECT datname FROM pg_database").fetchall()
    finally:
        server.stop()
        shutil.rmtree(folder)
    assert [figure["name"] for figure in figures] == names_for("postgresql")
    assert [figure for figure in figures if figure["value"] is None] == []
    assert not [name for (name,) in left if name.startswith("relay_bench_")]


@pytest.mark.thorough
def test_server_that_does_not_keep_its_commits_is_not_measured(postgresql_project: Project) -> None:
    arguments = ("--quick", "--json", "--only", "pg_pickup_p50")
    done = postgresql_project.manage("relay", "bench", *arguments, check=False)
    (figure,) = json.loads(done.stdout)["figures"]
    assert done.returncode == 1
    assert (figure["value"], figure["ok"]) == (None, False)
    assert "the server has fsync=off" in figure["fault"]


def test_figure_of_a_server_is_not_measured_without_one(relay: Relay, folder: Path) -> None:
    (figure,) = relay("bench", "--quick", "--json", "--only", "pg_claim_1m").data["figures"]
    assert "name its alias with --database" in figure["fault"]


def test_unknown_alias_is_refused(relay: Relay) -> None:
    with pytest.raises(CommandError, match="'elsewhere' is not in DATABASES"):
        relay("bench", "--database", "elsewhere")


def test_interrupted_run_stops_its_processes(folder: Path) -> None:
    def interrupt(_text: str) -> None:
        assert processes_with(f"TMPDIR={folder}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(
            runner.measure(
                "recovery", ["kill_recovery_p50"], folder / "r", quick=True, say=interrupt
            )
        )


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_bench_that_is_ended_leaves_no_process(
    project: Project, folder: Path, number: signal.Signals
) -> None:
    bench = project.spawn("relay", "bench", "--quick", "--only", "kill_recovery_p50")
    wait_until(lambda: "killing a worker" in project.log(bench))
    bench.send_signal(number)
    assert bench.wait(60) in {128 + number, -number}
    wait_until(lambda: not processes_with(f"TMPDIR={folder}"), message="bench left processes")
    if number == signal.SIGTERM:
        assert not list(folder.glob("relay-bench-*"))


def test_family_that_breaks_leaves_its_figures_unmeasured(folder: Path) -> None:
    found = runner.measure("nothing", ["idle_cpu"], folder / "n", quick=True, say=lambda _: None)
    (figure,) = found
    assert (figure["name"], figure["value"], figure["ok"]) == ("idle_cpu", None, False)
    assert "ended with code 1" in figure["fault"]


# -- judging and showing


@pytest.mark.parametrize(
    ("bar", "value", "ratio", "holds"),
    [
        (Bar("value", ">=", 10), 10, None, True),
        (Bar("value", ">=", 10), 9.9, 5, False),
        (Bar("value", "<=", 10), 10, None, True),
        (Bar("value", "<=", 10), 10.1, 0.1, False),
        (Bar("ratio", ">=", 0.8), 1, 0.8, True),
        (Bar("ratio", ">=", 0.8), 1_000, 0.79, False),
        (Bar("ratio", ">=", 0.8), 1_000, None, False),
    ],
)
def test_bar_holds_for_its_side_only(bar: Bar, value: float, ratio: Any, holds: bool) -> None:
    assert bar.holds(value, ratio) is holds


def test_fault_fails_a_figure_whatever_its_value_is() -> None:
    assert judge("other_writer_p99", 1.0).ok
    assert not judge("other_writer_p99", 1.0, fault="2 writes were refused").ok


def test_exit_code_is_0_only_if_every_figure_is_ok(
    relay: Relay, folder: Path, canned: Callable[..., None]
) -> None:
    good = judge("idle_cpu", 0.1).as_data()
    bad = judge("enqueue_one", 50.0, baseline=100.0, baseline_is="bare").as_data()
    canned(good, bad)
    assert relay("bench", "--only", "idle_cpu").code == 0
    answer = relay("bench", "--only", "idle_cpu", "enqueue_one")
    assert answer.code == 1
    rows = {line.split()[0]: line.split()[-1] for line in answer.text.splitlines() if line}
    assert (rows["idle_cpu"], rows["machine"]) == ("ok", "machine")
    assert "bar ratio >= 0.65: MISSED" in answer.text
    assert "baseline: bare" in answer.text


def test_unmeasured_figure_exits_with_1_and_says_why(
    relay: Relay, folder: Path, canned: Callable[..., None]
) -> None:
    canned(
        {**judge("idle_cpu", 0.0).as_data(), "value": None, "ok": False, "fault": "no such clock"}
    )
    answer = relay("bench", "--only", "idle_cpu")
    assert answer.code == 1
    assert "idle_cpu not measured" in answer.text
    assert "no such clock" in answer.text


def test_folder_in_memory_is_warned_about(
    relay: Relay, folder: Path, canned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    canned(judge("idle_cpu", 0.1).as_data())
    monkeypatch.setattr(runner, "file_system", lambda _: "tmpfs")
    assert "Set TMPDIR to a folder on a disk." in relay("bench", "--only", "idle_cpu").errors


def test_busy_machine_is_warned_about(
    relay: Relay, folder: Path, canned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    canned(judge("idle_cpu", 0.1).as_data())
    monkeypatch.setattr(runner.os, "getloadavg", lambda: (500.0, 0.0, 0.0))
    assert "The load average is 500 on" in relay("bench", "--only", "idle_cpu").errors


def test_unknown_figure_is_refused_with_the_nearest(relay: Relay) -> None:
    with pytest.raises(CommandError, match="Did you mean 'enqueue_bulk'"):
        relay("bench", "--only", "enqueue_blk")
    with pytest.raises(CommandError, match="The figures are lease_ack_4x16, "):
        relay("bench", "--only", "zzz")


def test_figures_of_a_family_are_measured_together() -> None:
    grouped = runner.by_family(["pickup_p99", "enqueue_one", "pickup_p50"])
    assert grouped == {"enqueue": ["enqueue_one"], "latency": ["pickup_p50", "pickup_p99"]}


# -- measuring


def test_rate_is_taken_from_the_middle_of_the_run() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    slow_ends = [start] * 10 + [start + timedelta(seconds=100)] * 10
    middle = [start + timedelta(seconds=50 + n / 10) for n in range(80)]
    first, last, rate = throughput.steady(sorted(slow_ends + middle))
    assert (first, last) == (middle[0], middle[-1])
    assert rate == pytest.approx(10)


def test_too_few_jobs_are_no_rate() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    with pytest.raises(LabError, match="too few"):
        throughput.steady([moment] * 5)


def test_percentile_is_a_sample_that_was_seen() -> None:
    samples = [float(n) for n in range(100, 0, -1)]
    assert [percentile(samples, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7


def test_waiting_ends_with_what_did_not_happen() -> None:
    with pytest.raises(LabError, match="the moon did not happen within 0 s"):
        wait_for("the moon", lambda: None, seconds=0)
