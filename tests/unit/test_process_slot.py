import pytest

from relay_queue.worker import supervisor
from relay_queue.worker.options import WorkerOptions
from relay_queue.worker.supervisor import ProcessSlot

OPTIONS = WorkerOptions(
    name="slot",
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
    slot = ProcessSlot(OPTIONS)
    delays = []
    for _ in range(9):
        slot.record_failed_start()
        delays.append(slot.start_at - clock.now)
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10])
    assert slot.failed_starts == 9


def test_a_worker_that_got_ready_ends_the_row_of_failed_starts_but_not_the_delay(
    clock: Clock,
) -> None:
    slot = ProcessSlot(OPTIONS)
    slot.record_failed_start()
    slot.record_failed_start()
    clock.now += 59
    slot.record_end(READY_AT)
    assert slot.failed_starts == 0
    assert slot.start_at - clock.now == pytest.approx(0.4)


def test_a_worker_that_was_ready_for_a_minute_is_replaced_quickly(clock: Clock) -> None:
    slot = ProcessSlot(OPTIONS)
    for _ in range(5):
        slot.record_end(READY_AT)
    clock.now += 60
    slot.record_end(READY_AT)
    assert slot.start_at - clock.now == pytest.approx(0.1)


def test_recycling_has_no_delay_and_forgets_old_failures(clock: Clock) -> None:
    slot = ProcessSlot(OPTIONS)
    slot.record_failed_start()
    slot.replace()
    assert (slot.start_at, slot.failed_starts) == (clock.now, 0)
    slot.record_failed_start()
    assert slot.start_at - clock.now == pytest.approx(0.1)
