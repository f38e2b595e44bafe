import pytest

from relay_queue.worker import supervisor
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.supervisor import Seat

OPTIONS = WorkerOptions(
    name="seat",
    queues=None,
    exclude_queues=(),
    backend=None,
    concurrency=1,
    lease_seconds=None,
    shutdown_timeout_seconds=30,
    drain=False,
    max_jobs=None,
)
READY_AT = 1_000.0


class Clock:
    """A monotonic clock that only a test moves."""

    def __init__(self) -> None:
        self.now = READY_AT

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


def test_the_delay_doubles_with_each_failed_start_up_to_ten_seconds(clock: Clock) -> None:
    seat = Seat(OPTIONS)
    delays = []
    for _ in range(9):
        seat.lose_start()
        delays.append(seat.start_at - clock.now)
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10])
    assert seat.failed_starts == 9


def test_a_worker_that_got_ready_ends_the_row_of_failed_starts_but_not_the_delay(
    clock: Clock,
) -> None:
    seat = Seat(OPTIONS)
    seat.lose_start()
    seat.lose_start()
    clock.now += 59
    seat.lose_worker(READY_AT)
    assert seat.failed_starts == 0
    assert seat.start_at - clock.now == pytest.approx(0.4)


def test_a_worker_that_was_ready_for_a_minute_is_replaced_quickly(clock: Clock) -> None:
    seat = Seat(OPTIONS)
    for _ in range(5):
        seat.lose_worker(READY_AT)
    clock.now += 60
    seat.lose_worker(READY_AT)
    assert seat.start_at - clock.now == pytest.approx(0.1)


def test_recycling_has_no_delay_and_forgets_old_failures(clock: Clock) -> None:
    seat = Seat(OPTIONS)
    seat.lose_start()
    seat.recycle()
    assert (seat.start_at, seat.failed_starts) == (clock.now, 0)
    seat.lose_start()
    assert seat.start_at - clock.now == pytest.approx(0.1)
