"""Whoever can write the table can write any path. Only tasks of the project run."""

from __future__ import annotations

import ast
import logging
import sys
from pathlib import Path

import pytest

import relay_queue
from relay_queue import store
from relay_queue.compat import TaskResultMismatch, task_backends
from relay_queue.exceptions import UnknownTask
from relay_queue.models import Job, Lease
from relay_queue.payload import checksum
from relay_queue.task import resolve
from relay_queue.testing import run_pending
from tests import tasks

pytestmark = pytest.mark.django_db

PACKAGE = Path(relay_queue.__file__).parent

SUSPICIOUS = [
    "os.system",
    "subprocess.run",
    "builtins.eval",
    "antigravity.fly",
    "this.s",
    "tests.tasks.plain",
    "tests.tasks.calls",
    "tests.tasks.alias.func",
    "tests.conftest.Project.close",
    "django.core.management.call_command",
    "relay_queue.store.transaction.transaction",
    "tests.tasks.__builtins__",
    "",
    ".",
    "..",
    "../../etc/passwd",
    "tests/tasks.add",
    "tests.tasks.add\n",
]


def plant(path: str, backend: str = "default") -> int:
    """Write a job with any path, as an intruder would who has the database."""
    with store.transaction() as tx:
        planted = store.enqueue(tx, store.new_job(task="tests.tasks.noop"))
    job = Job.objects.get(pk=planted.job_id)
    signed = checksum(job.queue, backend, path, job.payload, None)
    Job.objects.filter(pk=planted.job_id).update(task=path, backend=backend, checksum=signed)
    return planted.job_id


@pytest.mark.parametrize("path", SUSPICIOUS)
def test_a_path_to_anything_but_a_task_goes_dead_and_is_recorded(path: str) -> None:
    modules = set(sys.modules)
    job_id = plant(path)
    assert run_pending() == 1
    job = Job.objects.get(pk=job_id)
    lease = Lease.objects.get(job_id=job_id)
    assert (job.state, job.attempt) == ("dead", 1)
    assert job.last_error.startswith("UnknownTask: ")
    assert (lease.outcome, lease.error) == ("fatal", "relay_queue.exceptions.UnknownTask")
    assert "UnknownTask" in lease.traceback
    assert {"antigravity", "this"}.isdisjoint(set(sys.modules) - modules)
    with pytest.raises(TaskResultMismatch):
        task_backends["default"].get_result(str(job_id))


def test_a_refused_path_is_told_to_djangos_security_log(caplog: pytest.LogCaptureFixture) -> None:
    plant("os.system")
    with caplog.at_level(logging.WARNING, logger="django.security"):
        run_pending()
    (record,) = [r for r in caplog.records if r.name.startswith("django.security")]
    assert "'os.system'" in record.getMessage()


@pytest.mark.parametrize("alias", ["nowhere", "", "immediate"])
def test_an_alias_that_relay_does_not_back_runs_nothing(alias: str) -> None:
    job_id = plant("tests.tasks.note", alias)
    tasks.calls.clear()
    run_pending()
    assert Job.objects.get(pk=job_id).state == "dead"
    assert tasks.calls == []


def test_module_outside_of_the_project_is_not_imported_even_if_it_has_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "intruder.py").write_text(
        "from relay_queue.task import task\n@task\ndef strike() -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    job_id = plant("intruder.strike")
    run_pending()
    assert Job.objects.get(pk=job_id).state == "dead"
    assert "intruder" not in sys.modules


def test_nothing_is_written_when_the_task_of_an_enqueue_cannot_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = tasks.add
    monkeypatch.delattr(tasks, "add")
    resolve.cache_clear()
    with pytest.raises(UnknownTask):
        hidden.enqueue(1)
    assert not Job.objects.exists()


def test_no_module_of_the_package_can_read_a_pickle() -> None:
    dangerous = {"pickle", "cPickle", "dill", "marshal", "shelve", "jsonpickle"}
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, name) for name in names if name.split(".")[0] in dangerous]
    assert found == []
