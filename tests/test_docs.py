"""The documentation and the code agree: what one names, the other has."""

import argparse
import ast
import builtins
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import types
import unittest
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.apps import apps
from django.conf import global_settings
from django.core.management import CommandParser, call_command, get_commands

import relay_queue
from relay_queue import backend, checks, conf, exceptions, states
from relay_queue.admin.actions import catalogue
from relay_queue.cli import base
from relay_queue.context import RelayContext
from relay_queue.db import gatefile, replaced
from relay_queue.db.sqlite3 import base as engine
from relay_queue.lab.bench.figures import SPECS
from relay_queue.lab.drill.results import PROMISES
from relay_queue.management.commands.runworker import Command as RunWorker
from relay_queue.models import Job
from relay_queue.query import verify_rules
from relay_queue.task import RelayTask
from relay_queue.testing import run_pending
from relay_queue.verdict import Verdict
from relay_queue.wakeup import doorbell
from relay_queue.worker import database, liveness, watchdog
from tests import architecture
from tests.simulation.__main__ import parser as simulation_parser
from tests.store import actions

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/deploying").glob("*.md")])
PAGES = [*DOCS, ROOT / "README.md"]

DJANGO_OPTIONS = {"--settings", "--verbosity", "--no-color", "--help", "--database"} | {
    "--include-stale-apps"
}

# Named in the text, and nobody's setting or exception of ours.
FOREIGN_WORDS = {"NO_COLOR", "CONN_MAX_AGE"}
FOREIGN_NAMES = {"AnyResult", "KillMode", "OperationalError", "TestCase", "TimeoutStopSec"}


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    text: str


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(text: str) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(*parts) for parts in found]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_words(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


def section(text: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    start = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert start, f"there is no heading {title!r}"
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", prose_of_same_length(rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def prose_of_same_length(text: str) -> str:
    """Blank out fenced blocks, whose comments look like headings."""
    return re.sub(r"^```.*?^```$", lambda m: " " * len(m[0]), text, flags=re.MULTILINE | re.DOTALL)


def rows(text: str, *heading: str) -> list[list[str]]:
    """Return the cells of all tables whose heading begins with these columns."""
    found: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[: len(heading)] == list(heading):
            inside = True
        elif inside and set(line) != {"|", "-"}:
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    assert found, f"there is no table with the columns {heading}"
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def slugs(text: str) -> set[str]:
    """Return the anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --- Pages ---------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if link.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and anchor not in slugs(target.read_text())):
            broken.append(link)
    assert not broken


def test_index_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(((?:deploying/)?[\w-]+\.md)", page("index.md")))
    assert linked == {str(path.relative_to(ROOT / "docs")) for path in DOCS} - {"index.md"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_compile(path: Path) -> None:
    for block in blocks(path.read_text()):
        if block.language == "python":
            compile(block.text, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def identifiers(path: Path) -> set[str]:
    """Return the dotted names and files of the package that a page mentions."""
    text = path.read_text()
    imports = re.findall(r"^from (relay_queue[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    dotted = {f"{module}.{name}" for module, names in imports for name in names.split(", ")}
    dotted |= set(re.findall(r"(?<![\w/.])relay_queue(?:\.[A-Za-z]\w*)+", prose(text)))
    return {name for name in dotted if not re.search(r"\.[EWI]\d{3}$", name)}


def exists(dotted: str) -> bool:
    module_name, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(module_name), name)
        except ModuleNotFoundError:
            return False
    return True


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_names_of_the_package_exist(path: Path) -> None:
    loggers = {database.logger.name, "relay_queue.supervisor"}
    assert not {name for name in identifiers(path) - loggers if not exists(name)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_of_the_project_exist(path: Path) -> None:
    named = [word for word in code_words(path.read_text()) if re.match(r"(relay_\w+|tests)/", word)]
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_settings_and_exceptions_that_are_mentioned_exist(path: Path) -> None:
    words = code_words(path.read_text())
    keys = {item.name.upper() for item in fields(conf.RelaySettings)}
    asked = {key for word in words for key in re.findall(r'RELAY\["(\w+)"\]', word)}
    assert asked <= keys
    capitals = {word for word in words if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", word)}
    assert not {w for w in capitals - keys - FOREIGN_WORDS if not hasattr(global_settings, w)}
    names = {m[0] for word in words if (m := re.match(r"[A-Z][a-z]+([A-Z][a-z]+)+(?=\(|$)", word))}
    public = {name for listed in public_modules().values() for name in listed}
    known = {*vars(exceptions), *vars(builtins)} | FOREIGN_NAMES | public
    assert not names - known


# --- Public names --------------------------------------------------------------


def public_modules() -> dict[str, set[str]]:
    """Return the public modules and their public names, as api.md lists them."""
    listed = rows(page("api.md"), "Module", "Names")
    modules = {code(module)[0]: set(code(names)) for module, names, _ in listed}
    errors = rows(page("api.md"), "Exception", "Meaning")
    modules["relay_queue.exceptions"] = {code(name)[0] for name, _ in errors}
    return {"relay_queue": set(relay_queue.__all__), **modules}


def imported_by(text: str) -> Iterator[str]:
    """Yield the dotted names of the package that the examples of a page import."""
    for found in re.findall(r"^ *```python\n.*?^ *```$", text, re.MULTILINE | re.DOTALL):
        source = "\n".join(textwrap.dedent(found).splitlines()[1:-1])
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def not_public(text: str) -> set[str]:
    modules = public_modules()
    public = {*modules, *(f"{module}.{n}" for module, names in modules.items() for n in names)}
    return {name for name in imported_by(text) if name.split(".")[0] == "relay_queue"} - public


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name
)
def test_examples_import_public_names_only(path: Path) -> None:
    assert not not_public(path.read_text())


def test_an_example_that_imports_what_is_private_is_found() -> None:
    def of(line: str) -> set[str]:
        return not_public(f"1. So:\n   ```python\n   {line}\n   ```\n")

    assert of("from relay_queue import store") == {"relay_queue.store"}
    assert of("import relay_queue.wakeup") == {"relay_queue.wakeup"}
    assert of("from relay_queue.task import resolve, task") == {"relay_queue.task.resolve"}
    assert not of("from relay_queue import cancel, metrics")


def test_every_public_name_is_documented_and_every_documented_one_is_public() -> None:
    text = page("api.md")
    functions = rows(text, "Function") + rows(text, "Function on many")
    named = [code(cell)[0].partition("(")[0] for row in functions for cell in row[:2]]
    named += [code(row[0])[0] for row in rows(text, "Type")]
    assert sorted([*named, "current_context"]) == sorted(relay_queue.__all__)
    for module, names in public_modules().items():
        found = vars(importlib.import_module(module))
        assert not {n for n in names if n not in found and not hasattr(relay_queue, n)}, module
    errors = {
        name
        for name, kind in vars(exceptions).items()
        if isinstance(kind, type) and issubclass(kind, exceptions.RelayError)
    }
    assert public_modules()["relay_queue.exceptions"] == errors


def test_documented_signatures_are_those_of_the_functions() -> None:
    text = page("api.md")
    for cell, coroutine, _ in rows(text, "Function") + rows(text, "Function on many"):
        documented = code(cell)[0].replace("\\|", "|")
        name = documented.partition("(")[0]
        signature = inspect.signature(getattr(relay_queue, name))
        assert documented == f"{name}{signature}".replace("'", "")
        form = getattr(relay_queue, code(coroutine)[0])
        assert inspect.iscoroutinefunction(form)
        assert inspect.signature(form) == signature
    (line,) = re.findall(r"`(current_context.*?)`", text)
    signature = inspect.signature(relay_queue.current_context)
    assert line == f"current_context{signature}".replace("'", "")


def test_documented_attributes_of_a_job_are_those_it_has() -> None:
    table = {code(name)[0]: set(code(text)) for name, text in rows(page("api.md"), "Type")}
    assert table["JobInfo"] - {"get_job"} == {
        *(item.name for item in fields(relay_queue.JobInfo)),
        "is_finished",
    }


# --- Settings ------------------------------------------------------------------


def declared_settings() -> dict[str, tuple[Any, str]]:
    """Return key → default and bounds, as settings.md has them."""
    found = {}
    for key, default, bounds, *_ in rows(page("settings.md"), "Key", "Default"):
        found[code(key)[0]] = (ast.literal_eval(code(default)[0]), bounds)
    return found


def test_every_setting_is_documented_with_its_default() -> None:
    documented = {key: default for key, (default, _) in declared_settings().items()}
    assert documented == {f.name.upper(): f.default for f in fields(conf.RelaySettings)}


def test_every_option_of_a_queue_is_documented_with_its_default() -> None:
    found = rows(page("settings.md"), "Option of a queue", "Default")
    documented = {code(key)[0]: ast.literal_eval(code(default)[0]) for key, default, *_ in found}
    assert documented == {item.name: item.default for item in fields(conf.QueueOptions)}


def is_usable(key: str, value: object) -> bool:
    if key.islower():
        raw: dict[str, Any] = {"QUEUES": {"q": {key: value}}}
        key = "QUEUES"
    else:
        raw = {key: value}
    # Two keys that contradict each other are another matter than a value out of its bounds.
    faults = conf.problems(raw)
    return not any(fault.key == key and "not usable" in fault.message for fault in faults)


def test_documented_bounds_are_those_that_are_kept() -> None:
    text = page("settings.md")
    tables = rows(text, "Key", "Default") + rows(text, "Option of a queue", "Default")
    checked = 0
    for key, _, bounds, *_ in tables:
        name = code(key)[0]
        numbers = [ast.literal_eval(word) for word in code(bounds) if word[0].isdigit()]
        if not numbers:
            continue
        low, high = numbers
        assert is_usable(name, low), name
        assert is_usable(name, high), name
        assert not is_usable(name, low * 0.99 if low else -1), name
        assert not is_usable(name, high + 1), name
        assert is_usable(name, None) == bounds.endswith("or `None`"), name
        checked += 1
    assert checked > 25


def examples_of_the_setting() -> list[Any]:
    assigned = []
    for path in PAGES:
        for block in blocks(path.read_text()):
            if block.language == "python" and "RELAY = " in block.text:
                for statement in ast.parse(block.text).body:
                    if ast.unparse(statement).startswith("RELAY = "):
                        scope: dict[str, Any] = {}
                        exec(ast.unparse(statement), scope)
                        assigned.append(scope["RELAY"])
    return assigned


def test_examples_of_the_setting_are_usable() -> None:
    examples = examples_of_the_setting()
    assert len(examples) >= 2
    assert [conf.problems(example) for example in examples] == [[] for _ in examples]


# --- Failures ------------------------------------------------------------------


def test_the_failure_table_of_the_readme_is_that_of_the_drill() -> None:
    table = rows((ROOT / "README.md").read_text(), "", "Failure")
    assert table == [[name, row.failure, row.promise] for name, row in PROMISES.items()]


def test_each_failure_is_documented_under_what_the_drill_promises() -> None:
    text = page("failures.md")
    titles = re.findall(r"^### (F\d+ .+)$", text, re.MULTILINE)
    assert titles == [f"{name} {row.failure}" for name, row in PROMISES.items()]
    for title, row in zip(titles, PROMISES.values(), strict=True):
        told = " ".join(section(text, title).split())
        assert told.startswith(f"{row.promise}."), title
        assert row.not_on_server in told, title


# --- Commands ------------------------------------------------------------------


def verb_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    base.load(verb).add_arguments(parser)
    return parser


def worker_parser() -> argparse.ArgumentParser:
    parser = CommandParser(add_help=False)
    RunWorker().add_arguments(parser)
    return parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            found |= set(action.option_strings) or {str(action.metavar)}
    return found


def documented_options(title: str) -> set[str]:
    table = rows(section(page("commands.md"), title), "Option", "Effect")
    return {words.split(" ")[0] for option, *_ in table for words in code(option)}


def test_every_option_of_runworker_is_documented() -> None:
    assert documented_options("runworker") == options_of(worker_parser())


def test_every_verb_is_documented() -> None:
    titles = re.findall(r"^### relay ([\w-]+)$", page("commands.md"), re.MULTILINE)
    assert titles == list(base.VERBS)


@pytest.mark.parametrize("verb", base.VERBS)
def test_every_option_of_a_verb_is_documented(verb: str) -> None:
    assert documented_options(f"relay {verb}") == options_of(verb_parser(verb))


def test_choices_of_an_option_are_the_documented_ones() -> None:
    for verb in base.VERBS:
        for action in verb_parser(verb)._actions:
            if action.choices:
                table = rows(section(page("commands.md"), f"relay {verb}"), "Option", "Effect")
                name = (*action.option_strings, str(action.metavar))[0]
                (effect,) = [row[1] for row in table if name in row[0]]
                assert set(code(effect)) == set(action.choices), (verb, action.option_strings)


def test_every_exit_code_is_documented() -> None:
    codes = {int(code(row[0])[0]) for row in rows(page("commands.md"), "Code", "Meaning")}
    own = {base.INTERRUPTED, base.READER_GONE, database.EXIT_UNKNOWN, database.EXIT_REPLACED}
    assert codes == own | {watchdog.EXIT_STUCK, watchdog.EXIT_HOGGED, 0, 1, 2}


def test_every_figure_of_bench_is_documented() -> None:
    assert [code(row[0])[0] for row in rows(page("commands.md"), "Figure")] == list(SPECS)


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for path in PAGES:
        for block in blocks(path.read_text()):
            if block.language == "console":
                for line in block.text.splitlines():
                    words = shlex.split(line, comments=True)
                    if words:
                        yield path.name, words


def check_command(words: list[str]) -> None:
    match words:
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["python", "manage.py", "relay", verb, "--help"]:
            assert verb in base.VERBS
        case ["python", "manage.py", "relay", verb, *arguments]:
            base.parse(verb, arguments, argparse.Namespace(), command_line=False)
        case ["python", "manage.py", "runworker", *arguments]:
            worker_parser().parse_args(arguments)
        case ["python", "manage.py", name, *_]:
            assert name in get_commands()
        case ["python", "-m", "django", "startproject", *_]:
            pass
        case ["python", "-m", "tests.simulation", *arguments]:
            simulation_parser().parse_args(arguments)
        case ["pip", "install", package] | ["python", "-m", "pip", "install", package]:
            check_package(package)
        case _:
            raise AssertionError(f"nobody knows whether this works: {shlex.join(words)}")


def check_package(wanted: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extra = wanted.rstrip("]").partition("[")
    assert name == project["name"]
    assert not extra or extra in project["optional-dependencies"]


def test_command_lines_are_understood() -> None:
    for name, words in command_lines():
        try:
            check_command(words)
        except SystemExit as refusal:
            raise AssertionError(f"{name}: {shlex.join(words)}") from refusal


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_verbs_and_options_in_the_text_exist(path: Path) -> None:
    words = code_words(path.read_text())
    verbs = {m[1] for word in words if (m := re.match(r"relay ([\w-]+)", word))}
    assert verbs <= set(base.VERBS)
    known = DJANGO_OPTIONS | options_of(worker_parser())
    known |= {option for verb in base.VERBS for option in options_of(verb_parser(verb))}
    assert {m for word in words for m in re.findall(r"(?<!\S)--[\w-]+", word)} <= known


@pytest.mark.django_db
def test_keys_to_watch_are_in_the_output_of_status() -> None:
    actions.register()
    actions.enqueue()
    output = io.StringIO()
    call_command("relay", "status", "--json", stdout=output)
    table = rows(section(page("operating.md"), "Watch it"), "Alert when", "With")
    keys = {word for row in table for word in code(row[0]) if not word.startswith("relay ")}
    assert len(keys) > 5
    assert not {key for key in keys if f'"{key}": ' not in output.getvalue()}


# --- Checks, states, failures --------------------------------------------------


def system_checks() -> set[str]:
    """Return the ids that the package gives to messages, without the prefix."""
    found: set[str] = set()
    for path in (ROOT / "relay_queue").rglob("*.py"):
        found |= set(re.findall(r"relay_queue\.([EWI]\d{3})\b", path.read_text()))
    return found | set(re.findall(r'"([EWI]\d{3})"', Path(checks.__file__).read_text()))


def test_every_system_check_is_documented() -> None:
    titles = re.findall(r"^### relay_queue\.(\w+)$", page("checks.md"), re.MULTILINE)
    assert len(titles) == len(set(titles))
    assert set(titles) == system_checks()
    for title in titles:
        text = section(page("checks.md"), f"relay_queue.{title}")
        assert "**Cause.**" in text, title
        assert "**Way out.**" in text, title


def test_system_checks_that_are_mentioned_exist() -> None:
    for path in PAGES:
        assert set(re.findall(r"\b[EWI]\d{3}\b", path.read_text())) <= system_checks(), path.name


def test_documented_transitions_are_the_legal_ones() -> None:
    pairs = [(code(a)[0], code(b)[0]) for a, b, _ in rows(page("states.md"), "From", "To")]
    legal = {(a.value, b.value) for a, targets in states.TRANSITIONS.items() for b in targets}
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == legal


def test_the_drawing_of_the_states_has_the_legal_transitions() -> None:
    (drawing,) = (
        block.text for block in blocks(page("internals.md")) if "stateDiagram" in block.text
    )
    arrows = re.findall(r"^ +(\S+) --> (\S+) : \S.*$", drawing, re.MULTILINE)
    assert len(arrows) == drawing.count("-->")
    legal = {(a.value, b.value) for a, targets in states.TRANSITIONS.items() for b in targets}
    assert {(a, b) for a, b in arrows if "[*]" not in (a, b)} == legal
    assert {a for a, b in arrows if b == "[*]"} == {state.value for state in states.TERMINAL}
    assert len(arrows) == len(set(arrows))


def test_documented_outcomes_are_those_of_leases() -> None:
    table = {code(row[0])[0]: row[2:] for row in rows(page("states.md"), "Outcome", "Meaning")}
    yes_no = {True: "yes", False: "no"}
    assert table == {
        outcome.value: [yes_no[outcome not in states.UNCHARGED], yes_no[outcome in states.ANSWERED]]
        for outcome in states.Outcome
    }


def test_every_failure_of_the_readme_is_explained() -> None:
    promised = re.findall(r"^\| (F\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    explained = re.findall(r"^### (F\d+) ", page("failures.md"), re.MULTILINE)
    assert promised == explained == [f"F{number}" for number in range(1, 16)]


def test_failures_of_the_database_in_the_readme_name_a_test_and_are_explained() -> None:
    table = rows((ROOT / "README.md").read_text(), "Failure of the database", "What happens")
    assert len(table) == 3
    titles = re.findall(r"^## (.+)$", page("failures.md"), re.MULTILINE)
    anchors = {title.lower().replace(" ", "-") for title in titles}
    for failure, promise, test in table:
        assert promise
        (anchor,) = re.findall(r"\(docs/failures\.md#([\w-]+)\)", failure)
        assert anchor in anchors, failure
        (named,) = code(test)
        file, _, function = named.partition("::")
        source = ast.parse((ROOT / "tests" / "process" / file).read_text())
        tests = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
        assert function in tests, named


def test_every_verdict_is_explained() -> None:
    documented = [code(row[0])[0] for row in rows(page("failures.md"), "Verdict")]
    assert sorted(documented) == sorted(str(verdict.label) for verdict in Verdict)


def test_every_fault_that_verify_finds_is_explained() -> None:
    kinds = [code(row[0])[0] for row in rows(page("failures.md"), "Kind", "Meaning")]
    assert sorted(kinds) == sorted(verify_rules.ADVICE)


def test_every_table_is_described() -> None:
    named = [code(row[0])[0] for row in rows(page("internals.md"), "Table", "Holds")]
    models = apps.get_app_config("relay_queue").get_models()
    assert sorted(named) == sorted(
        model._meta.db_table for model in models if not model._meta.proxy
    )


def test_every_permission_is_described() -> None:
    named = [code(row[0])[0] for row in rows(page("acts.md"), "Permission of `relay_queue`")]
    models = list(apps.get_app_config("relay_queue").get_models())
    permissions = {codename for model in models for codename, _ in model._meta.permissions}
    views = {name for name in named if name.startswith("view_")} - permissions
    assert set(named) == permissions | views
    assert views <= {f"view_{model._meta.model_name}" for model in models}


def test_every_act_is_described_with_the_states_that_it_is_for() -> None:
    found = {row[0]: set(code(row[1])) for row in rows(page("acts.md"), "Act", "For jobs that are")}
    assert found == {str(act.label): set(act.states) for act in catalogue.JOB_ACTIONS}


def test_layers_of_contributing_are_those_that_are_enforced() -> None:
    table = rows((ROOT / "CONTRIBUTING.md").read_text(), "Layer", "Modules", "May")
    described = [(name, frozenset(code(modules))) for name, modules, _ in table]
    assert described == list(reversed(architecture.LAYERS))


def test_layers_of_the_internals_are_those_that_are_enforced() -> None:
    (block,) = blocks(section(page("internals.md"), "Layers"))
    drawn = [re.split(r"  +", line, maxsplit=1) for line in block.text.splitlines()]
    described = [(name, frozenset(parts.split(" · "))) for name, parts in drawn]
    assert described == list(reversed(architecture.LAYERS))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/internals.md"])
def test_limits_of_files_are_those_that_are_enforced(name: str) -> None:
    text = " ".join((ROOT / name).read_text().split())
    longest = re.search(r"odules? (?:stay within|has more than) (\d+) lines", text)
    function = re.search(r"functions? (?:within|more than) (\d+)", text)
    shortest = re.search(r"module (?:under|has fewer than) (\d+) lines", text)
    found = [int(match[1]) if match else None for match in (longest, function, shortest)]
    limits = [getattr(architecture, f"{kind}_LINES") for kind in KINDS_OF_LIMITS]
    assert found == limits


KINDS_OF_LIMITS = ("MAX_MODULE", "MAX_FUNCTION", "MIN_MODULE")


def test_each_of_ten_questions_is_answered_in_two_files_at_most() -> None:
    answers = {
        question: code(files) for question, files in rows(page("internals.md"), "Question", "Files")
    }
    assert len(answers) == 10
    for question, words in answers.items():
        files = [word for word in words if word.endswith(".py")]
        assert 1 <= len(files) <= 2, question
        assert all((ROOT / file).is_file() for file in files), question


def test_files_that_contributing_names_exist() -> None:
    words = code_words((ROOT / "CONTRIBUTING.md").read_text())
    named = {word for word in words if re.fullmatch(r"[\w./]+(/|\.py|\.md)", word)}
    assert len(named) > 15
    homes = (ROOT, ROOT / "relay_queue", ROOT / "tests/admin")
    ours = {name for name in named if not name.startswith("var/")}
    assert not [name for name in ours if not any((home / name).exists() for home in homes)]


def test_the_glossary_is_in_alphabetical_order_and_has_each_word_once() -> None:
    words = [row[0].strip("*").lower() for row in rows(page("glossary.md"), "Word", "Meaning")]
    assert words == sorted(set(words))


def test_the_glossary_has_the_verbs_outcomes_and_layers_that_the_code_leans_on() -> None:
    table = rows(page("glossary.md"), "Word", "Meaning")
    words = {word.strip() for row in table for word in row[0].strip("*").lower().split(",")}
    verbs = {"ack", "nack", "snooze", "release", "settle", "claim", "renew", "recover", "promote"}
    parts = {"supervisor", "worker", "loop", "slot", "tick", "service", "gate", "bell", "session"}
    assert verbs | parts | {"settlement", "verdict", "ring", "trial", "transition"} <= words


def test_files_beside_the_database_bear_their_documented_names() -> None:
    table = rows(page("engine.md"), "Name", "What it is")
    named = {word.removeprefix("db.sqlite3") for row in table for word in code(row[0])}
    gate = gatefile.GateFile("").path
    beside = {doorbell.BELLS_SUFFIX + "/", liveness.WORKERS_SUFFIX + "/"}
    assert named == {"-wal", "-shm", f"{replaced.ASIDE}…", gate, f"{gate}-next"} | beside


def test_engine_has_the_documented_defaults() -> None:
    table = {code(row[0])[0]: row[1] for row in rows(page("engine.md"), "Option", "Default")}
    assert float(code(table["timeout"])[0]) == engine.DEFAULT_TIMEOUT_SECONDS
    assert f"{engine.JOURNAL_SIZE_LIMIT_BYTES // 2**20} MiB" in page("engine.md")
    assert "PRAGMA synchronous=FULL" in engine.INIT_COMMANDS


# --- Writing tasks, quickstart -------------------------------------------------


def test_every_option_of_a_task_is_documented() -> None:
    table = rows(page("writing-tasks.md"), "Option", "Of")
    documented = {code(option)[0] for option, *_ in table}
    assert documented == {item.name for item in fields(RelayTask)} - {"func"}
    with_using = {code(option)[0] for option, of, *_ in table if "using" in of}
    assert with_using == set(RelayTask.using.__annotations__) - {"return"}
    text = page("writing-tasks.md")
    assert all(
        f"`{name}`" in text[text.index("`OPTIONS` of an alias") :] for name in backend.OPTIONS
    )


def test_every_attribute_of_the_context_is_documented() -> None:
    table = rows(page("writing-tasks.md"), "Attribute", "Meaning")
    named = {code(row[0])[0].removesuffix("()") for row in table}
    own = {name for name in vars(RelayContext) if not name.startswith("_")} - {"job"}
    assert named == own


def run_example(text: str, module: types.ModuleType) -> None:
    """Run a block as a module, then the jobs that it enqueued and the tests that it defines."""
    exec(compile(text, module.__name__, "exec"), vars(module))
    run_pending()
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
            for name in unittest.defaultTestLoader.getTestCaseNames(kind):
                getattr(kind(name), name)()  # in this test's own transaction


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("name", "enqueued"),
    [("writing-tasks.md", 109), ("api.md", 3), ("operating.md", 0)],
    ids=str,
)
def test_examples_run(name: str, enqueued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, block in enumerate(blocks(page(name))):
        if block.language == "python":
            module = types.ModuleType(f"documented_block_{number}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            run_example(block.text, module)
    # All were run by the name of their task, and only the one that is to be cancelled was.
    ends = Counter(Job.objects.values_list("state", flat=True))
    assert ends == ({"succeeded": enqueued - 1, "cancelled": 1} if enqueued else {})


def matches(pattern: str, line: str) -> bool:
    parts = (re.escape(part) for part in pattern.split("…"))
    return re.fullmatch(".*".join(parts), line) is not None


class Reader:
    """Does what a page says, in order, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = ""
        clean = {name: text for name, text in os.environ.items() if not name.startswith("DJANGO")}
        self.environment = {**clean, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def obey(self, block: Block) -> None:
        match block.language:
            case "console":
                self.output = "".join(map(self.run, block.text.splitlines()))
            case "python":
                self.write(block.text)
            case "text":
                for line in block.text.splitlines():
                    seen = self.output.splitlines()
                    assert any(matches(line, other) for other in seen), (line, self.output)

    def run(self, line: str) -> str:
        words = shlex.split(line)
        if "pip" in words:
            return ""  # what it would install is here already
        assert words[0] == "python"
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def write(self, text: str) -> None:
        heading = re.match(r"# (\S+) \((new|append)\)\n", text)
        assert heading, f"the first line does not say where this belongs:\n{text}"
        path = self.directory / heading[1]
        before = path.read_text() if heading[2] == "append" else ""
        path.write_text(before + text)


@pytest.mark.slow
def test_quickstart_works_as_printed(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in blocks(page("quickstart.md")):
        reader.obey(block)
    reader.run('python manage.py shell -c "import shop.views"')
