"""The named points of a tick, at which tests and the drill act."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from relay_queue.models import Job
from relay_queue.worker.plan import HOOKS, Plan, Point
from relay_queue.worker.tick import tick
from tests.store import actions

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def worker_id(each_engine: None) -> Iterator[int]:
    yield actions.register()
    HOOKS.clear()


def test_a_tick_comes_to_every_point_in_order_and_only_the_first_is_told_the_plan(
    worker_id: int,
) -> None:
    reached: list[tuple[str, type]] = []
    for point in get_args(Point):
        HOOKS[point] = lambda facts, point=point: reached.append((point, type(facts)))
    plan = Plan(worker_id, list, lambda: 1, queues=["default"])
    done = tick(plan)
    first, *others = get_args(Point)
    assert reached == [(first, Plan), *((point, type(done)) for point in others)]


@pytest.mark.parametrize(
    ("point", "state"), [("begin", "ready"), ("claimed", "ready"), ("committed", "running")]
)
def test_what_a_hook_raises_undoes_the_tick_unless_it_has_committed(
    worker_id: int, point: Any, state: str
) -> None:
    def fail(_facts: object) -> None:
        raise RuntimeError("of the hook")

    job_id = actions.enqueue()
    HOOKS[point] = fail
    with pytest.raises(RuntimeError, match="of the hook"):
        tick(Plan(worker_id, list, lambda: 1, queues=["default"]))
    assert Job.objects.get(pk=job_id).state == state
