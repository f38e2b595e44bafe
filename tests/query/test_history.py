"""What workers have counted comes back as series, totals and percentiles."""

from datetime import timedelta
from typing import Any

import pytest

from relay_queue import store
from relay_queue.models import QueueMinute
from relay_queue.query import history
from tests.store import actions

MINUTE = timedelta(minutes=1)
HALF_HOUR = timedelta(minutes=30)


def note(wall: actions.Wall, ago: int, queue: str = "mail", worker: int = 1, **counts: int) -> None:
    """Write what a worker did so many minutes ago."""
    minute = wall().replace(second=0, microsecond=0) - ago * MINUTE
    totals = store.Totals(**counts)
    if done := counts.get("succeeded"):
        totals.wait[store.bucket(0.004)] = done
        totals.run[store.bucket(2.0)] = done
    actions.do(store.roll_up, worker, {(queue, minute): totals})


def test_series_adds_up_queues_and_workers_by_span(wall: actions.Wall) -> None:
    wall.advance(75)
    note(wall, 0, succeeded=3)
    note(wall, 0, queue="media", succeeded=4, failed=1, retried=1)
    note(wall, 0, worker=2, succeeded=5)
    note(wall, 20, succeeded=7)
    note(wall, 24 * 60, succeeded=100)
    spans = history.series(wall(), HALF_HOUR, 48)
    assert len(spans) == 48
    assert [(span.tally.succeeded, span.tally.failed) for span in spans[-3:]] == [
        (0, 0),
        (7, 0),
        (12, 1),
    ]
    assert spans[-1].start == actions.START
    assert history.total(spans).succeeded == 19, "a day and no more"


def test_recent_minutes_tell_queues_apart(wall: actions.Wall) -> None:
    note(wall, 2, succeeded=3)
    note(wall, 1, queue="media", succeeded=1, failed=3, died=1, retried=2)
    note(wall, 60, succeeded=9)
    found = history.recent(wall())
    assert [span.tally.succeeded for span in found.spans[-4:]] == [0, 3, 1, 0]
    assert found.queues["media"].failure_rate == 0.75
    assert found.queues["mail"].failure_rate == 0
    assert (found.wait.total, found.run.total) == (4, 4)


def test_nothing_done_has_no_rate_and_no_percentile() -> None:
    assert history.Tally().failure_rate is None
    assert history.Histogram().percentile(0.5) is None


@pytest.mark.parametrize("seconds", [0.000_3, 0.02, 1.0, 90.0, 4_000.0])
def test_percentile_lies_in_the_bucket_of_the_duration(seconds: float) -> None:
    histogram = history.Histogram({store.bucket(seconds): 10})
    for share in (0.01, 0.5, 0.99, 1.0):
        estimate = histogram.percentile(share)
        assert estimate is not None
        assert seconds / 2 <= estimate <= seconds * 2


def test_percentiles_follow_the_counts() -> None:
    histogram = history.Histogram({store.bucket(0.001): 98, store.bucket(10.0): 2})
    half, most = histogram.percentile(0.5), histogram.percentile(0.99)
    assert half is not None
    assert most is not None
    assert half < 0.002
    assert most > 5


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"3": null}', "{"])
def test_altered_histogram_is_left_out(text: str, wall: actions.Wall) -> None:
    for minute, histogram in enumerate(['{"3": 1, "12": 5}', text, '{"4": 2, "3":1}', "{}"]):
        actions.rows(QueueMinute).create(
            queue="q",
            minute=actions.START - timedelta(minutes=minute),
            wait_histogram=histogram,
            run_histogram='{"7": 1}',
        )
    found = history.recent(wall.now)
    assert found.wait.counts == {3: 2, 4: 2, 12: 5}
    assert found.run.counts == {7: 4}


def test_an_hour_is_added_up_by_the_database(wall: actions.Wall) -> None:
    totals = {
        (f"q{n}", actions.START - timedelta(minutes=minute)): store.Totals(succeeded=1)
        for n in range(20)
        for minute in range(30)
    }
    for worker_id in (1, 2, 3):
        actions.do(store.roll_up, worker_id, totals)
    fetched: list[int] = []
    rows = history.reads.rows

    def count(*asked: Any) -> list[tuple[Any, ...]]:
        found = rows(*asked)
        fetched.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history.reads, "rows", count)
        found = history.recent(wall.now)
    assert sum(fetched) <= 30 + 20 + 2 * 64, "not one for each of the 1,800 rows"
    assert history.total(found.spans).succeeded == 20 * 30 * 3
    assert {tally.succeeded for tally in found.queues.values()} == {30 * 3}
    assert history.total(history.recent(wall.now, queue="q7").spans).succeeded == 30 * 3
