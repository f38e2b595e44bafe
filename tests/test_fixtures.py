"""The fixtures do what tests of real processes rely on: share a file, and leave nothing running."""

import os
import signal
import subprocess
import sys

import pytest
from django.contrib.auth import get_user_model

from tests.conftest import Project, children_of_this_process, wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(1000)"


def test_wait_until_returns_what_it_waited_for() -> None:
    values = iter([0, 0, 7])
    assert wait_until(lambda: next(values), timeout=5) == 7


def test_wait_until_says_what_did_not_happen() -> None:
    with pytest.raises(AssertionError, match="the lamp is off"):
        wait_until(lambda: False, timeout=0.05, message=lambda: "the lamp is off")


def test_scratch_file_is_migrated_and_each_test_has_its_own(project: Project) -> None:
    assert project.rows("SELECT count(*) FROM relay_queue_job") == [(0,)]
    project.python(
        "from django.contrib.auth.models import Group; Group.objects.create(name='mine')"
    )
    assert project.rows("SELECT name FROM auth_group") == [("mine",)]


def test_failing_command_fails_the_test_with_its_output(project: Project) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"Unknown command"):
        project.manage("no_such_command")
    assert project.manage("no_such_command", check=False).returncode == 1


def test_processes_share_the_database_of_the_test(live_project: Project) -> None:
    get_user_model().objects.create(username="here")
    seen = live_project.python(
        "from django.contrib.auth.models import User\n"
        "print(*User.objects.values_list('username', flat=True))\n"
        "User.objects.create(username='there')"
    )
    assert seen.stdout.split() == ["here"]
    assert get_user_model().objects.filter(username="there").exists()


def test_close_ends_a_process_even_if_it_is_stopped(project: Project) -> None:
    process = project.spawn_python(SLEEP)
    wait_until(lambda: "up" in project.log(process), message=lambda: project.log(process))
    process.send_signal(signal.SIGSTOP)
    project.close()
    assert process.returncode == -signal.SIGTERM
    assert project.pids() == {}


def test_close_reports_and_ends_an_orphan(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.STOP_SECONDS", 0.2)
    project.python(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,\n"
        "    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
        SLEEP,
    )
    with pytest.raises(AssertionError, match="left running"):
        project.close()
    wait_until(lambda: not project.pids(), message=lambda: str(project.pids()))


def test_child_processes_are_seen_until_they_are_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    assert process.pid in children_of_this_process()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.pid in children_of_this_process()
    process.wait()
    assert process.pid not in children_of_this_process()
