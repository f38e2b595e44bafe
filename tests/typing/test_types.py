"""The example project satisfies mypy's strict mode, and each of its mistakes is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relay_queue.task import RelayTask
from relay_queue.task import task as decorator

pytest.importorskip("mypy")

pytestmark = pytest.mark.xdist_group("types")  # mypy runs once for all of them

PROJECT = Path(__file__).parent / "project"
ROOT = Path(__file__).resolve().parents[2]
USES = PROJECT / "shop" / "uses.py"

CONFIGURATION = """
[mypy]
strict = True
plugins = mypy_django_plugin.main
enable_error_code = ignore-without-code, truthy-bool
follow_untyped_imports = True
[mypy-django_tasks.*]
ignore_missing_imports = True
[mypy.plugins.django-stubs]
django_settings_module = "settings"
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines that mypy prints of the example project."""
    directory = tmp_path_factory.mktemp("mypy")
    configuration = directory / "mypy.ini"
    configuration.write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", f"--config-file={configuration}"]
    command += [f"--cache-dir={directory / 'cache'}", "--no-pretty", "-m", "settings", "-p", "shop"]
    path = os.pathsep.join([str(PROJECT), str(ROOT)])
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, "MYPYPATH": path, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_mistakes_and_only_they_are_errors(findings: list[str]) -> None:
    found: dict[tuple[str, int], set[str]] = {}
    for line in findings:
        if match := re.match(r"(.+?):(\d+): error: .*\[([\w-]+)\]$", line):
            found.setdefault((match[1], int(match[2])), set()).add(match[3])
    expected = {
        ("shop/uses.py", number): set(match[1].split())
        for number, line in enumerate(USES.read_text().splitlines(), 1)
        if (match := re.search(r"# error: ([\w -]+)$", line))
    }
    assert len(expected) > 10
    assert found == expected


def test_the_signature_of_the_function_is_that_of_enqueue(findings: list[str]) -> None:
    revealed = [line.split("Revealed type is ")[1] for line in findings if "Revealed" in line]
    # How a default is shown differs between versions of mypy.
    one, coroutine, with_context = (re.sub(r" =( \.\.\.)?", "", line) for line in revealed)
    assert one.startswith('"def (order_id: int, note: str) -> ')
    assert one.endswith('TaskResult[[order_id: int, note: str], str]"')
    assert coroutine.startswith('"def (order_id: int, note: str) -> ')
    assert "Coroutine" in coroutine
    assert with_context.startswith('"def (order_id: int) -> ')


def test_the_example_uses_every_option_there_is() -> None:
    options = set(decorator.__annotations__) - {"function", "return"}
    source = (PROJECT / "shop" / "tasks.py").read_text()
    assert {name for name in options if f"{name}=" not in source} == set()
    uses = USES.read_text()
    assert {
        n for n in set(RelayTask.using.__annotations__) - {"return"} if f"{n}=" not in uses
    } == set()
