"""What doctor says of workers and leases that need an operator, on each engine."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

import pytest

import relay_queue
from relay_queue import clock
from relay_queue.models import Lease
from tests.cli.test_doctor import Relay, findings
from tests.store import actions

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def transactional_db(each_engine: None) -> None:
    """Real transactions, on each engine in turn."""


def test_leases_that_nobody_ends_are_named_with_the_way_out(relay: Relay) -> None:
    actions.enqueue_each(2)
    first, second = actions.claim(2)
    assert findings(relay("doctor", "--json"))["leases"]["level"] == "ok"
    long_ago = clock.now() - timedelta(hours=2)
    actions.rows(Lease).filter(pk=first.lease_id).update(expires_at=long_ago)
    actions.rows(Lease).filter(pk=second.lease_id).update(
        expires_at=clock.now() - timedelta(seconds=5)
    )
    found = findings(relay("doctor", "--json"))["leases"]
    assert found["level"] == "warn"
    assert found["text"].startswith("1 long overdue, the oldest for 2 h")
    assert "relay recover" in found["hint"]


def test_a_worker_of_another_version_is_named(relay: Relay) -> None:
    same = actions.register(version=relay_queue.__version__)
    other = actions.register(version="0.0.9")
    found = findings(relay("doctor", "--json"))
    assert f"version of {same}" not in found
    assert found[f"version of {other}"]["level"] == "warn"
    text = found[f"version of {other}"]["text"]
    assert text == f"Relay 0.0.9, and this is {relay_queue.__version__}"


def test_a_worker_that_has_started_before_the_code_was_changed_is_named(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "shop.py"
    code.touch()
    module = ModuleType("tests.a_shop")
    module.__file__ = str(code)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    later = time.time() + 3600
    os.utime(code, (later, later))
    here = actions.register(host=socket.gethostname())
    elsewhere = actions.register(host="another")
    found = findings(relay("doctor", "--json"))
    assert found[f"code of {here}"]["level"] == "warn"
    text = found[f"code of {here}"]["text"]
    assert text == "tests.a_shop was changed after the worker had started"
    assert "Restart" in found[f"code of {here}"]["hint"]
    assert f"code of {elsewhere}" not in found
    code.unlink()
    with clock.use(lambda: datetime.now(UTC) + timedelta(hours=2)):
        late = actions.register(host=socket.gethostname())
    found = findings(relay("doctor", "--json"))
    assert f"code of {late}" not in found
