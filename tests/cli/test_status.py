"""Status shows how queues and workers stand, from counters and indexes alone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import load_command_class
from django.core.management.base import CommandError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from relay_queue import __version__, clock
from relay_queue.cli import status as command
from relay_queue.query import status
from tests.store import actions

pytestmark = pytest.mark.django_db
Relay = Callable[..., Any]


@pytest.fixture
def busy() -> None:
    """Make jobs in most states, and a worker that holds one."""
    worker_id = actions.register(name="alpha", host="here", pid=42)
    actions.enqueue(queue="mail", run_after=clock.now() + timedelta(hours=1))
    actions.enqueue(queue="mail")
    for _ in range(2):
        actions.enqueue(queue="default")
    actions.nack(actions.claim_one(), fatal=True)
    actions.claim_one(worker_id=worker_id)
    with actions.store.transaction() as tx:
        actions.store.pause(tx, "mail")
        actions.store.set_limits(tx, "mail", capacity=4, max_running=None)


def test_table_shows_queues_by_state_with_a_sum(relay: Relay, busy: None) -> None:
    lines = relay("status").text.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[2:7] if line}
    assert table["queue"] == ["sched", "ready", "run", "retry", "done", "dead", "cancel"]
    assert table["default"] == ["0", "0", "1", "0", "0", "1", "0"]
    assert table["mail"] == ["1", "1", "0", "0", "0", "0", "0"]
    assert table["(all)"] == ["1", "1", "1", "0", "0", "1", "0"]


def test_limits_pauses_workers_and_dead_letters_are_shown(relay: Relay, busy: None) -> None:
    text = relay("status").text
    assert "2 of 4 (50%)" in text
    assert "paused" in text
    assert any(line.split()[:5] == ["alpha", "here", "42", "8", "1"] for line in text.splitlines())
    assert "dead letters                  1" in text
    assert "in 59 min" in text or "in 1 h" in text


def test_lines_fit_a_terminal_of_80_columns(relay: Relay, busy: None) -> None:
    assert max(map(len, relay("status").text.splitlines())) <= 80


def test_json_has_every_state_of_every_queue(relay: Relay, busy: None) -> None:
    data = relay("status", "--json").data
    mail = next(queue for queue in data["queues"] if queue["name"] == "mail")
    assert mail["counts"]["scheduled"] == mail["counts"]["ready"] == 1
    assert len(mail["counts"]) == 7
    assert mail["capacity"] == 4
    assert mail["oldest_wait_seconds"] >= 0
    assert data["dead"] == 1
    assert data["workers"][0]["open_leases"] == 1


def test_a_queue_that_no_worker_serves_is_named_and_workers_show_their_queues(
    relay: Relay,
) -> None:
    actions.register(name="alpha", queues=["default", "reports"])
    for queue in ("default", "mail", "paused"):
        actions.enqueue(queue=queue)
    actions.do(actions.store.pause, "paused")
    answer = relay("status")
    assert "No worker serves queue mail. Start one with manage.py runworker" in answer.text
    assert answer.text.count("No worker serves") == 1
    assert "default, reports" in answer.text
    actions.register(name="beta", queues=["a", "b", "c", "d"])
    assert "a, b and 2 more" in relay("status").text
    assert relay("status", "--json").data["unserved"] == ["mail"]


def test_no_queue_is_called_unserved_by_a_worker_of_all_queues_or_without_any_worker(
    relay: Relay,
) -> None:
    actions.enqueue(queue="mail")
    assert "No worker serves" not in relay("status").text
    actions.register(queues=[])
    text = relay("status").text
    assert "No worker serves" not in text
    assert text.count(" all\n") == 1


def test_a_queue_that_a_worker_leaves_out_is_not_served_by_it(relay: Relay) -> None:
    actions.register(name="alpha", queues=[], exclude_queues=["mail", "slow"])
    for queue in ("mail", "default"):
        actions.enqueue(queue=queue)
    answer = relay("status")
    assert "No worker serves queue mail." in answer.text
    assert "all but mail, slow" in answer.text
    data = relay("status", "--json").data
    assert data["unserved"] == ["mail"]
    (worker,) = data["workers"]
    assert (worker["queues"], worker["exclude_queues"]) == ([], ["mail", "slow"])


def test_the_tables_are_bounded_and_what_matters_stays(relay: Relay) -> None:
    for n in range(60):
        actions.enqueue(queue=f"q{n:02}")
    actions.enqueue(queue="q07")
    for n in range(60):
        worker = actions.register(name=f"w{n:02}", queues=["q00"])
    actions.do(actions.store.heartbeat, worker, actions.store.Totals(), "cannot claim jobs")
    answer = relay("status")
    assert "The 50 queues with the most to do; 10 more with --json." in answer.text
    assert "q07" in answer.text
    assert "No worker serves 39 more queues, either; --json names them." in answer.text
    assert "hindered: cannot claim jobs" in answer.text
    assert "10 more workers with --json." in answer.text
    assert answer.text.count("\n") < 300
    data = relay("status", "--json").data
    assert (len(data["queues"]), len(data["workers"])) == (60, 60)


def test_empty_queue_says_what_to_do(relay: Relay) -> None:
    text = relay("status").text
    assert "There is no queue yet" in text
    assert "manage.py runworker" in text


def test_status_never_reads_a_whole_table(busy: None) -> None:
    with CaptureQueriesContext(
        connection,
    ) as queries:
        status.read_status()
    for query in queries.captured_queries:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN QUERY PLAN {query['sql']}")
            steps = [row[3] for row in cursor.fetchall()]
        for step in steps:
            assert "SCAN relay_queue_job" not in step or "USING" in step, (query["sql"], steps)
            assert "SCAN relay_queue_lease" not in step or "USING" in step, (query["sql"], steps)


def test_late_returns_are_counted(relay: Relay) -> None:
    actions.enqueue()
    held = actions.claim_one()
    actions.cancel(held.job_id)
    actions.ack(held)
    assert relay("status", "--json").data["refused_last_day"] == 1


def test_watch_shows_it_again_until_ctrl_c(
    relay: Relay, busy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", nap)
    answer = relay("status", "--watch", "5")
    assert naps == [5.0, 5.0, 5.0]
    assert answer.text.count("Relay at ") == 3
    assert answer.code == 130


def test_the_version_is_that_of_relay_and_not_of_django() -> None:
    assert load_command_class("relay_queue", "relay").get_version() == __version__


def test_watch_that_would_never_rest_is_refused(relay: Relay) -> None:
    with pytest.raises(CommandError, match=r"'0' is too often\. Write 0\.1"):
        relay("status", "--watch", "0")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("stopped", "stopped"),
        ("", "stopped"),
        ("stopped by an operator", "stopped by an operator"),
        ("died: its lock was free", "died: its lock was free"),
    ],
)
def test_worker_that_has_ended_is_said_once_to_have(relay: Relay, reason: str, shown: str) -> None:
    worker_id = actions.register(name="alpha")
    actions.do(actions.store.stop_workers, [worker_id], reason)
    (line,) = [line for line in relay("status").text.splitlines() if line.startswith("alpha")]
    assert line.endswith(f"ago  {shown}")


def test_long_names_leave_room_for_the_numbers_and_are_whole_for_programs(relay: Relay) -> None:
    long = f"{'a' * 50}{'b' * 50}"
    actions.enqueue(queue=long)
    actions.register(name=long, host=long)
    text = relay("status").text
    assert "aaaaaaaaaaaaaa…bbbbbbbbb" in text
    assert max(map(len, text.splitlines())) <= 100
    for verb in (("doctor",), ("inspect",), ("quiet", "--all")):
        lines = [line for line in relay(*verb).text.splitlines() if "aaaaaaaaaaaaaa…" in line]
        assert lines
        assert "a" * 15 not in "".join(lines)
        assert max(map(len, lines)) <= 130
    data = relay("status", "--json").data
    assert (data["queues"][0]["name"], data["workers"][0]["host"]) == (long, long)
