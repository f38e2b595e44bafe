"""The examples of the README run as printed, in a project that Django itself begins."""

from __future__ import annotations

import ast
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import django
import pytest

from tests.conftest import wait_until

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ORDER = "from types import SimpleNamespace\norder = SimpleNamespace(id=7)\n"


def section(title: str) -> str:
    """Return what stands under a heading."""
    return re.split(r"^## ", README.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def block(text: str, language: str) -> str:
    """Return the first fenced block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no block of {language}"
    return found[1]


def files_in(text: str) -> dict[str, str]:
    """Return the files that a block prints one after the other, each under a comment with its name."""
    _, *parts = re.split(r"^# (\S+\.py)\b.*\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def for_this_django(text: str) -> str:
    """Do what the comments say of Django 5.2, if it is that."""
    if django.VERSION >= (6, 0):
        return text
    text = re.sub(r"^.*# Django 5\.2: (from .*)$", r"\1", text, flags=re.MULTILINE)
    return re.sub(
        r'\](\s*# Django 5\.2: .*"django_tasks".*)$',
        r', "django_tasks"]\1',
        text,
        flags=re.MULTILINE,
    )


class Newcomer:
    """Somebody who follows the README in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **{k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"},
            "PYTHONPATH": str(ROOT),
        }
        self.run("-m", "django", "startproject", "shop", ".")

    def append(self, name: str, text: str) -> None:
        with (self.directory / name).open("a") as file:
            file.write(f"\n{text}")

    def command(self, line: str) -> list[str]:
        python, *arguments = line.partition("#")[0].split()
        assert python == "python"
        return arguments

    def run(self, *arguments: str) -> str:
        """Run Python to its end and return what it prints."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def jobs(self) -> list[tuple[str, str, str]]:
        """Return task, queue and state of every job."""
        with closing(sqlite3.connect(self.directory / "db.sqlite3", timeout=30)) as connection:
            return connection.execute("SELECT task, queue, state FROM relay_queue_job").fetchall()

    def work_until_all_succeeded(self, line: str) -> None:
        """Start the worker as printed; stop it when nothing is left."""
        with (self.directory / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, *self.command(line)],
                cwd=self.directory,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(
                lambda: {state for *_, state in self.jobs()} == {"succeeded"},
                30,
                lambda: f"{self.jobs()}\n{(self.directory / 'worker.log').read_text()}",
            )
        finally:
            worker.terminate()
            assert worker.wait(60) == 0


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    """Return a newcomer who has written down the files of the first example."""
    newcomer = Newcomer(tmp_path)
    files = files_in(for_this_django(block(section("Add it to a project"), "python")))
    assert list(files) == ["settings.py", "shop/tasks.py", "shop/views.py"]
    newcomer.append("shop/settings.py", files["settings.py"])
    newcomer.append("shop/tasks.py", files["shop/tasks.py"])
    newcomer.append(
        "view.py", f"{ORDER}from shop.tasks import send_receipt\n{files['shop/views.py']}"
    )
    return newcomer


def commands() -> list[str]:
    return block(section("Add it to a project"), "console").splitlines()


def test_the_first_example_runs_as_printed(newcomer: Newcomer) -> None:
    migrate, runworker = commands()
    newcomer.run(*newcomer.command(migrate))
    newcomer.run("manage.py", "check", "--fail-level", "WARNING")
    newcomer.run("manage.py", "shell", "-c", "exec(open('view.py').read())")
    assert newcomer.jobs() == [("shop.tasks.send_receipt", "default", "ready")]
    newcomer.work_until_all_succeeded(runworker)


def test_the_example_of_options_runs_as_printed(newcomer: Newcomer) -> None:
    source = block(section("Options of a task"), "python")
    use = ast.parse(source).body[-1]
    module = source.splitlines()[: use.lineno - 1]
    (newcomer.directory / "shop" / "tasks.py").write_text("\n".join(module))
    enqueue = f"{ORDER}from shop.tasks import send_receipt\nresult = {ast.unparse(use)}\n"
    migrate, runworker = commands()
    newcomer.run(*newcomer.command(migrate))
    ids = newcomer.run(
        "manage.py",
        "shell",
        "-c",
        f"{enqueue}again = {ast.unparse(use)}\nprint(result.id, again.id)",
    )
    assert ids.splitlines()[-1] == "1 1"
    assert newcomer.jobs() == [("shop.tasks.send_receipt", "mail", "ready")]
    newcomer.work_until_all_succeeded(runworker)


DJANGOS_SETTINGS = """
for name in ("relay_queue", "rangefilter"):
    INSTALLED_APPS.remove(name)
del TASKS
DATABASES["default"]["ENGINE"] = "django.db.backends.sqlite3"
"""


def test_the_page_on_uninstalling_works_as_printed(newcomer: Newcomer) -> None:
    newcomer.run(*newcomer.command(commands()[0]))
    newcomer.run("manage.py", "shell", "-c", "exec(open('view.py').read())")
    later = "from datetime import timedelta\nfrom django.utils import timezone\n"
    later += "from shop.tasks import send_receipt\n"
    later += "send_receipt.using(run_after=timezone.now() + timedelta(days=1)).enqueue(8)"
    newcomer.run("manage.py", "shell", "-c", later)
    page = (ROOT / "docs" / "uninstall.md").read_text()
    see, end, remove = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in see.splitlines():
        newcomer.run(*newcomer.command(line))
    named = json.loads((newcomer.directory / "jobs.json").read_text())
    states = sorted(job["fields"]["state"] for job in named)
    assert states == ["ready", "scheduled"]
    for line in end.splitlines():
        newcomer.run(*newcomer.command(line))
    assert sorted(state for *_, state in newcomer.jobs()) == ["cancelled", "succeeded"]
    newcomer.run(*newcomer.command(remove.strip()))
    newcomer.append("shop/settings.py", DJANGOS_SETTINGS)
    newcomer.run("manage.py", "check", "--fail-level", "WARNING")
    newcomer.run("manage.py", "remove_stale_contenttypes", "--include-stale-apps", "--no-input")
    assert "relay_queue" not in newcomer.run("manage.py", "inspectdb")
    with closing(sqlite3.connect(newcomer.directory / "db.sqlite3")) as connection:
        query = "SELECT count(*) FROM django_content_type WHERE app_label = 'relay_queue'"
        assert connection.execute(query).fetchone() == (0,)
