"""Verify reads large tables of a server a part at a time."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

from relay_queue import payload as payload_codec
from relay_queue.query.verify import verify
from tests.store.actions import connection, enqueue_each

pytestmark = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)


def test_server_hands_out_payloads_as_they_are_asked_for(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor that outlives its transaction is written down in full before its first row."""
    enqueue_each(3)
    checksum, kept = payload_codec.checksum, []

    def looking(*columns: Any) -> int:
        with connection().cursor() as cursor:
            cursor.execute("SELECT is_holdable FROM pg_cursors")
            kept.extend(cursor.fetchall())
        return checksum(*columns)

    monkeypatch.setattr(payload_codec, "checksum", looking)
    assert verify().ok
    assert kept == [(False,)] * 3


def test_server_that_goes_away_meanwhile_is_no_fault_of_the_jobs(engine: str) -> None:
    enqueue_each(3)
    here = connection()
    done: list[int] = []

    def cut(what: str, jobs: int, _total: int) -> None:
        if what == "jobs":
            done.append(jobs)
            other = here.copy()
            with other.cursor() as cursor:
                pid = here.connection.info.backend_pid
                cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
            other.close()

    with pytest.raises(OperationalError):
        verify(jobs_per_range=1, progress=cut)
    assert done == [1]
    here.close()
