import os
import signal
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from relay_queue.management import preflight
from relay_queue.management.commands import runworker
from relay_queue.worker.options import WorkerOptions
from tests.conftest import STOP_SECONDS, Project, wait_until

BACKEND = "relay_queue.backend.RelayBackend"


class Started(Exception):
    """Raised in the place of supervising; carries what would have run."""


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives ``runworker`` arguments and returns what it would run."""

    def supervise(
        self: object, options: WorkerOptions, processes: int, settings: object, given: object
    ) -> int:
        raise Started(options, processes)

    monkeypatch.setattr(runworker.Command, "_supervise", supervise)

    def run(*arguments: str) -> tuple[WorkerOptions, int]:
        with pytest.raises(Started) as started:
            call_command("runworker", *arguments, skip_checks=True)
        options, processes = started.value.args
        return options, processes

    return run


def test_the_defaults_are_those_of_the_settings(resolve: Any, settings: Any) -> None:
    settings.RELAY = {"CONCURRENCY": 5, "PROCESSES": 3, "SHUTDOWN_TIMEOUT_SECONDS": 7}
    options, processes = resolve()
    assert (options.concurrency, processes, options.shutdown_timeout_seconds) == (5, 3, 7)
    assert options.queues is None
    assert options.exclude_queues == ()
    assert options.backend is None
    assert options.lease_seconds is None
    assert options.max_jobs is None
    assert not options.drain
    assert options.name


def test_arguments_win_over_the_settings(resolve: Any, settings: Any) -> None:
    settings.RELAY = {"CONCURRENCY": 5, "PROCESSES": 3}
    options, processes = resolve(
        *("--concurrency", "2", "--processes", "4", "--name", "mine", "--drain"),
        *("--max-jobs", "9", "--lease-seconds", "12.5", "--shutdown-timeout", "0"),
    )
    assert (options.concurrency, processes, options.name, options.drain) == (2, 4, "mine", True)
    assert (options.max_jobs, options.lease_seconds) == (9, 12.5)
    assert options.shutdown_timeout_seconds == 0


def test_queues_are_listed_with_commas_or_repeated_and_keep_their_order(resolve: Any) -> None:
    options, _ = resolve("--queue", "mail, reports", "--queue", "default,mail")
    assert options.queues == ("mail", "reports", "default")


def test_excluded_queues_are_kept_apart_or_taken_off_the_list(resolve: Any) -> None:
    assert resolve("--exclude-queue", "mail")[0].exclude_queues == ("mail",)
    both, _ = resolve("--queue", "mail,reports", "--exclude-queue", "mail")
    assert both.queues == ("reports",)
    assert both.exclude_queues == ()


def test_a_star_is_every_queue(resolve: Any) -> None:
    options, _ = resolve("--queue-name", "*", "--exclude-queues", "mail")
    assert (options.queues, options.exclude_queues) == (None, ("mail",))


def test_the_names_that_other_queues_use_are_understood(resolve: Any) -> None:
    options, _ = resolve("--queue-name", "mail", "--batch", "--max-tasks", "3", "--interval", "0.5")
    assert (options.queues, options.drain, options.max_jobs) == (("mail",), True, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], r"--concurrency is 0. Use an integer from 1 to 1,024"),
        (["--processes", "0"], r"--processes is 0. Use an integer from 1 to 256"),
        (["--max-jobs", "0"], r"--max-jobs is 0. Use 1 or more"),
        (["--lease-seconds", "0.5"], r"--lease-seconds is 0.5. Use 1 to 86400"),
        (["--lease-seconds", "nan"], r"--lease-seconds is nan"),
        (["--shutdown-timeout", "-1"], r"--shutdown-timeout is -1.0. Use a number from 0"),
        (["--interval", "-1"], r"--interval is -1.0. Use seconds above 0"),
        (["--interval", "nan"], r"--interval is nan. Use seconds above 0"),
        (["--interval", "inf"], r"--interval is inf. Use seconds above 0"),
        (["--name", ""], r"--name is ''. Use 1 to 90 characters"),
        (["--name", "x" * 91], r"Use 1 to 90 characters"),
        (["--name", "a\nb"], r"characters that can be printed"),
        (["--queue", "mail,,reports"], r"the queue name '' has 0 characters"),
        (["--queue", "mail", "--exclude-queue", "mail"], r"leaves none of the queues"),
        (["--backend", "nowhere"], r"alias 'nowhere' is not in TASKS. Use one of: default"),
        (["--backend", "defualt"], r"Did you mean 'default'\?"),
    ],
)
def test_a_bad_argument_is_named_with_its_limit(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call_command("runworker", *arguments, skip_checks=True)


def test_an_unknown_queue_is_refused_when_the_settings_list_them(
    settings: Any,
) -> None:
    settings.RELAY = {"QUEUES": ["mail", "reports"]}
    with pytest.raises(CommandError, match=r"'mial' is not one of .* Did you mean 'mail'\?"):
        call_command("runworker", "--queue", "mial", skip_checks=True)
    with pytest.raises(CommandError, match=r"Use one of: mail, reports"):
        call_command("runworker", "--exclude-queue", "xyz", skip_checks=True)


def test_a_queue_to_which_no_alias_admits_jobs_is_refused(resolve: Any, settings: Any) -> None:
    settings.TASKS = {
        "default": {"BACKEND": BACKEND},
        "mail": {"BACKEND": BACKEND, "QUEUES": ["mail", "letters"]},
    }
    assert resolve("--queue", "default,letters")[0].queues == ("default", "letters")
    with pytest.raises(
        CommandError, match=r"no alias of TASKS admits the queue 'defualt'.*'default'"
    ):
        call_command("runworker", "--queue", "defualt", skip_checks=True)
    with pytest.raises(CommandError, match=r"Did you mean 'letters'\?"):
        call_command("runworker", "--exclude-queue", "leters", skip_checks=True)
    settings.TASKS = {**settings.TASKS, "any": {"BACKEND": BACKEND, "QUEUES": []}}
    assert resolve("--queue", "defualt")[0].queues == ("defualt",)


def test_a_backend_of_another_kind_is_refused(settings: Any) -> None:
    kind = "django.tasks" if _django_has_tasks() else "django_tasks"
    settings.TASKS = {
        "relay": {"BACKEND": BACKEND, "QUEUES": []},
        "other": {"BACKEND": f"{kind}.backends.dummy.DummyBackend"},
    }
    with pytest.raises(CommandError, match=r"'other' is not backed by Relay. Use one of: relay"):
        call_command("runworker", "--backend", "other", skip_checks=True)


def _django_has_tasks() -> bool:
    import django

    return django.VERSION >= (6, 0)


def test_wrong_settings_are_one_message(settings: Any) -> None:
    settings.RELAY = {"CONCURENCY": 1}
    with pytest.raises(CommandError, match='Did you mean "CONCURRENCY"'):
        call_command("runworker", skip_checks=True)


def test_the_banner_says_what_is_about_to_run(resolve: Any) -> None:
    options, _ = resolve("--queue", "mail,reports", "--concurrency", "1", "--name", "mine")
    lines = runworker.banner(options, 2, "default", ["shop.tasks.a, shop.tasks.b", "a fault"])
    assert lines[0].endswith("worker mine: 2 processes with 1 slot each")
    assert "mail, reports" in lines[1]
    excluded, _ = resolve("--exclude-queue", "mail")
    assert "all but mail" in runworker.banner(excluded, 1, "default", [""])[1]
    assert lines[4:6] == ["  tasks     shop.tasks.a, shop.tasks.b", "            a fault"]


def test_a_migrated_database_has_no_fault(project: Project) -> None:
    look = "from relay_queue.management.preflight import database_fault"
    found = project.python(f"{look}; print(repr(database_fault('default')))")
    assert found.stdout == "''\n"


def test_a_database_without_tables_leads_to_migrate(tmp_path: Path) -> None:
    project = Project(tmp_path / "empty.sqlite3", tmp_path / "logs")
    refused = project.manage("runworker", check=False)
    assert refused.returncode == 1
    assert "Run manage.py migrate." in refused.stderr
    assert "0001_initial" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_file_that_is_no_database_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "broken.sqlite3"
    path.write_bytes(os.urandom(4096))
    refused = Project(path, tmp_path / "logs").manage("runworker", check=False)
    assert refused.returncode == 1
    assert "the database cannot be used: file is not a database" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_tasks_of_the_apps_are_known_and_a_module_that_is_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "brokenapp"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "tasks.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with override_settings(INSTALLED_APPS=["relay_queue", "tests", "brokenapp"]):
        paths, faults = preflight.known_tasks()
    assert {"tests.tasks.add", "tests.tasks.fail"} <= set(paths)
    assert paths == sorted(set(paths))
    (fault,) = faults
    assert fault.startswith("brokenapp.tasks cannot be imported: ModuleNotFoundError(")


def test_what_a_module_of_tasks_does_when_it_is_looked_at_hides_no_task_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = {
        "leaving": "raise SystemExit('not here')\n",
        "lazy": (
            "from django.utils.functional import SimpleLazyObject\n"
            "rates = SimpleLazyObject(lambda: 1 / 0)\n"
        ),
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "tasks.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with override_settings(INSTALLED_APPS=["relay_queue", "tests", *sources]):
        paths, faults = preflight.known_tasks()
    assert "tests.tasks.add" in paths
    assert faults == ["leaving.tasks cannot be imported: SystemExit('not here')"]


def test_no_more_than_some_tasks_are_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"shop.tasks.number_{n}" for n in range(25)]
    monkeypatch.setattr(preflight, "known_tasks", lambda: (many, ["a\x1bfault"]))
    named, fault = preflight.tasks_found()
    assert named.endswith("shop.tasks.number_19 and 5 more")
    assert fault == "a\\x1bfault"
    monkeypatch.setattr(preflight, "known_tasks", lambda: ([], []))
    assert preflight.tasks_found() == [preflight.NO_TASKS]


def test_a_person_is_told_what_runs_and_what_ctrl_c_does_without_any_logging_set_up(
    project: Project,
) -> None:
    workers = project.spawn("runworker")
    wait_until(lambda: bool(project.rows("SELECT 1 FROM relay_queue_worker")))
    assert "  tasks     tests.tasks.add, " in project.log(workers)
    workers.send_signal(signal.SIGINT)
    assert workers.wait(STOP_SECONDS) == 0
    assert "Stopping: workers have 30 s to finish what they run." in project.log(workers)


def test_an_init_system_is_not_warned_of_the_stop_that_it_ordered(project: Project) -> None:
    workers = project.spawn("runworker")
    wait_until(lambda: bool(project.rows("SELECT 1 FROM relay_queue_worker")))
    workers.terminate()
    assert workers.wait(STOP_SECONDS) == 0
    assert "Stopping" not in project.log(workers)
