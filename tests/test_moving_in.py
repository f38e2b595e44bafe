"""The pages on moving in name what exists, and their examples run."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from django.core.management import CommandParser

from relay_queue import conf, exceptions, store, testing
from relay_queue.cli import base
from relay_queue.management.commands.runworker import Command
from relay_queue.models import Job
from relay_queue.task import RelayTask
from relay_queue.testing import run_pending

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "moving-in"
PAGES = sorted(DIRECTORY.glob("*.md"))
every_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)

KEYS = {item.name.upper() for item in fields(conf.RelaySettings)}
QUEUE_OPTIONS = {item.name for item in fields(conf.QueueOptions)}


def python_blocks(text: str) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def right_cells(text: str) -> str:
    """Return what the tables say of Relay, and the prose around them."""
    lines = []
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        lines.append(line.rstrip("|").rpartition(" | ")[2] if line.startswith("|") else "")
    return "\n".join(lines)


def test_there_is_a_page_for_each_neighbour() -> None:
    names = {path.stem for path in PAGES}
    assert names == {"from-celery", "from-django-q2", "from-django-tasks-db", "from-huey"}


@every_page
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_file(), link
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in slugs, link


@every_page
def test_what_it_says_of_relay_exists(path: Path) -> None:
    cells = right_cells(path.read_text())
    parser = CommandParser()
    Command().add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", cells)) <= options
    assert set(re.findall(r"`relay (\w+)", cells)) <= set(base.VERBS)
    assert set(re.findall(r"`(RETAIN_[A-Z_]+)`", cells)) <= KEYS
    raised = set(re.findall(r"raise (\w+)\(", cells))
    assert all(hasattr(exceptions, name) for name in raised)
    known = set(RelayTask.__dataclass_fields__) | {"base_seconds", "max_seconds", "jitter"}
    assert set(re.findall(r"(\w+)=", cells)) <= known | {"after_seconds"}
    assert ("run_on_enqueue" in cells) <= hasattr(testing, "run_on_enqueue")
    assert {word for word in ("capacity", "max_running") if f"`{word}`" in cells} <= QUEUE_OPTIONS


@pytest.mark.django_db
@every_page
def test_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = python_blocks(path.read_text())
    module = ModuleType("tests.moving_in_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block, path.name, "exec"), vars(module))
    if "TASKS" in vars(module):
        assert module.TASKS["default"]["BACKEND"] == "relay_queue.backend.RelayBackend"
        store.job_options(task="t", **module.TASKS["default"]["OPTIONS"])
        return
    assert Job.objects.exists()
    run_pending()
    assert not Job.objects.exclude(state__in=["succeeded", "scheduled"]).exists()
