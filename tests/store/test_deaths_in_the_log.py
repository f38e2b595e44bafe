"""The log says of every job that goes dead in the store why: once it is committed, and only then."""

from __future__ import annotations

import logging

import pytest

from relay_queue import store
from relay_queue.models import Job
from tests.refusing import refusing
from tests.store.actions import (
    Wall,
    claim,
    claim_one,
    do,
    enqueue,
    kill,
    nack,
    register,
    rolled_back,
    rows,
    state,
)

pytestmark = pytest.mark.usefixtures("wall")


@pytest.fixture(autouse=True)
def from_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="relay_queue")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "relay_queue.store"]


def test_a_job_whose_worker_died_at_the_last_attempt(caplog: pytest.LogCaptureFixture) -> None:
    job_id = enqueue(max_attempts=2)
    for _ in range(2):
        assert said(caplog) == []
        kill(claim_one(worker_id=register()))
    why = "attempt 2 was its last: the worker died; the effect of this attempt is unknown"
    assert said(caplog) == [f"job {job_id} will not be tried again, since {why}"]


def test_a_job_whose_last_lease_ran_out(caplog: pytest.LogCaptureFixture, wall: Wall) -> None:
    job_id = enqueue(max_attempts=1)
    claim_one()
    wall.advance(61)
    with rolled_back() as tx:
        assert store.recover_expired(tx)[0].state == "dead"
    assert said(caplog) == []
    do(store.recover_expired)
    (line,) = said(caplog)
    assert line.startswith(f"job {job_id} will not be tried again, since attempt 1 was its last: ")
    assert "the lease ran out" in line


def test_an_altered_job_that_a_claim_finds(caplog: pytest.LogCaptureFixture) -> None:
    job_id, sound = enqueue(), enqueue()
    rows(Job).filter(pk=job_id).update(payload="{}")
    assert [claimed.job_id for claimed in claim(5)] == [sound]
    (line,) = said(caplog)
    assert line.startswith(f"job {job_id} will not be tried again, since its row was altered: ")


def test_a_job_that_is_proven_to_be_at_fault(caplog: pytest.LogCaptureFixture) -> None:
    bad = enqueue()
    with refusing("INSERT", "relay_queue_lease", f"new.job_id = {bad}"):
        assert (
            do(store.claim, worker_id=None, queues=["default"], limit=5, trial=store.Trial()) == []
        )
    (line,) = said(caplog)  # and none of the sound job that it was compared with
    assert line.startswith(f"job {bad} will not be tried again, since its row was altered: ")


@pytest.mark.parametrize(
    ("fatal", "attempts", "why"),
    [(True, 3, "its failure is fatal"), (False, 1, "attempt 1 was its last"), (False, 2, "")],
)
def test_a_failure_that_its_owner_has_not_logged(
    caplog: pytest.LogCaptureFixture, fatal: bool, attempts: int, why: str
) -> None:
    job_id = enqueue(max_attempts=attempts)
    nack(claim_one(), message="ValueError: no", fatal=fatal)
    line = f"job {job_id} will not be tried again, since {why}: ValueError: no"
    assert said(caplog) == ([line] if why else [])


def test_a_failure_that_its_owner_has_logged(caplog: pytest.LogCaptureFixture) -> None:
    job_id = enqueue()
    settlement = claim_one().settlement(
        "nack", message="ValueError: no", fatal=True, death_logged=True
    )
    do(store.settle, [settlement])
    assert (state(job_id), said(caplog)) == ("dead", [])


def test_a_handler_that_raises_does_not_make_the_commit_look_failed() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError

    job_id, handler = enqueue(max_attempts=1), Broken()
    logging.getLogger("relay_queue").addHandler(handler)
    try:
        nack(claim_one(), message="ValueError: no")
    finally:
        logging.getLogger("relay_queue").removeHandler(handler)
    assert state(job_id) == "dead"
