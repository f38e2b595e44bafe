"""The build run: green only if every step is, the summary last, and nothing left running.

The script is run on a stand-in Makefile, so that its steps take no time and fail on demand.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import (
    ROOT,
    SHARE_VARIABLE,
    processes_with,
    pytest_collection_modifyitems,
    wait_until,
)

MAKEFILE = """\
setup:
\t@{setup}
test:
\t@{test}
lint:
\t@{lint}
types:
\t@echo types
check:
\t@echo check
audit:
\t@echo audit
"""

PASSING = "echo '===== 3 passed, 1 skipped in 1.50s ====='"
FAILING = "echo '===== 1 failed, 2 passed in 75.25s (0:01:15) ====='; exit 1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a directory with the script, and in ``bin`` a browser that the machine may not have."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "chromium", "true")
    return tmp_path


def program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def machine_without(name: str, directory: Path) -> str:
    """Return a search path to every program of this machine but one."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for found in Path(place).glob("*"):
            link = directory / found.name
            if found.name != name and not link.is_symlink():
                link.symlink_to(found)
    return str(directory)


def start(checkout: Path, **recipes: str) -> subprocess.Popen[str]:
    steps = {"setup": "echo setup", "test": PASSING, "lint": "echo lint", **recipes}
    (checkout / "Makefile").write_text(MAKEFILE.format(**steps))
    return subprocess.Popen(
        ["bash", ".ci/run"],
        cwd=checkout,
        # On this machine nothing is installed for the sake of a test.
        env={
            **os.environ,
            "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
            "CI": "true",
            "MARK_OF_TEST": str(checkout),
            "RELAY_TEST_ENGINES": "sqlite",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(checkout: Path, **recipes: str) -> tuple[int, list[str]]:
    process = start(checkout, **recipes)
    output, _ = process.communicate(timeout=120)
    assert processes_with(f"MARK_OF_TEST={checkout}") == {}
    return process.returncode, output.splitlines()


def runs(lines: list[str]) -> int:
    """Return on how many Pythons the tests ran: that depends on the machine."""
    return sum(bool(re.match(r"=== tests on .*: ", line)) for line in lines)


def test_green_run_ends_with_the_sum_of_all_summaries(checkout: Path) -> None:
    status, lines = run(checkout)
    n = runs(lines)
    assert status == 0
    assert n >= 1
    assert lines[-1] == f"===== {3 * n} passed, {n} skipped in {1.5 * n:.2f}s ====="


def test_every_python_gets_its_share_of_the_shared_tests(checkout: Path) -> None:
    _, lines = run(checkout, test=f'echo "share $$RELAY_TEST_SHARE"; {PASSING}')
    n = runs(lines)
    shares = [line for line in lines if line.startswith("share ")]
    assert shares == [f"share {number}/{n}" for number in range(1, n + 1)]


def marked(group: str | None) -> Callable[[str], pytest.Mark | None]:
    """Return what an item answers to the question for the mark of its group."""
    mark = pytest.mark.xdist_group(group).mark if group else None
    return lambda _name: mark


def test_shares_together_are_every_test_and_only_shared_ones_are_dealt_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"tests/simulation/test_seeds.py::test_no_seed[{n}]" for n in range(40)]
    names += [f"tests/store/test_claim.py::test_one[postgresql-{n}]" for n in range(40)]
    alone = [f"tests/unit/test_conf.py::test_one[{n}]" for n in range(9)]
    group = [f"tests/admin/test_journeys.py::test_one[{n}]" for n in range(9)]
    kept = []
    for share in ("1/2", "2/2"):
        monkeypatch.setenv(SHARE_VARIABLE, share)
        items = [Mock(nodeid=name, get_closest_marker=marked(None)) for name in (*names, *alone)]
        items += [Mock(nodeid=name, get_closest_marker=marked("browser")) for name in group]
        pytest_collection_modifyitems(Mock(), items)
        kept.append({item.nodeid for item in items})
    assert kept[0] & kept[1] == set(alone)
    assert kept[0] | kept[1] == {*names, *alone, *group}
    assert len(kept[0] & set(group)) in {0, len(group)}, "its one browser is started once"
    assert min(map(len, kept)) > len(alone) + 20


def test_failing_tests_fail_the_run_and_are_counted(checkout: Path) -> None:
    status, lines = run(checkout, test=FAILING)
    n = runs(lines)
    assert status == 1
    assert lines[-1] == f"===== {n} failed, {2 * n} passed in {75.25 * n:.2f}s ====="


def test_machine_on_which_no_browser_can_be_installed_fails_the_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "bin" / "chromium").unlink()
    program(checkout / ".ci" / "install-chromium", "echo no network; exit 1")
    monkeypatch.setenv("PATH", machine_without("chromium", checkout / "others"))
    status, lines = run(checkout)
    assert status == 1
    assert "FAILED: install Chromium" in lines


def test_failing_lint_fails_the_run_although_tests_pass(checkout: Path) -> None:
    status, lines = run(checkout, lint="exit 3")
    assert status == 1
    assert "FAILED: lint" in lines
    assert "passed" in lines[-1]


def test_tests_that_print_no_summary_fail_the_run(checkout: Path) -> None:
    status, lines = run(checkout, test="echo nothing to see")
    assert status == 1
    assert lines[-1] == "===== no tests ran in 0.00s ====="


def test_a_summary_is_that_of_the_python_whose_tests_printed_it(checkout: Path) -> None:
    # The first of the runs prints none, as one that does not end in its time.
    once = "if [ -e begun ]; then echo '===== 3 passed in 1.50s ====='; else touch begun; fi"
    status, lines = run(checkout, test=once)
    assert status == 1
    (without,) = [line for line in lines if line.startswith("FAILED: no test summary on ")]
    silent = without.removeprefix("FAILED: no test summary on ")
    told = [line for line in lines if line.endswith(": ===== 3 passed in 1.50s =====")]
    assert not any(line.startswith(f"{silent}:") for line in told)


def test_environment_that_cannot_be_made_fails_the_run(checkout: Path) -> None:
    status, lines = run(checkout, setup="exit 1")
    assert status == 1
    assert lines[-1] == "===== no tests ran in 0.00s ====="


def test_step_that_leaves_a_process_behind_fails_and_the_process_is_ended(checkout: Path) -> None:
    # In a session of its own: the process group of the step would not find it.
    status, lines = run(checkout, lint="setsid sleep 1000 & sleep 0.5")
    assert status == 1
    assert "=== lint left processes behind" in lines


def test_step_without_end_is_ended(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_CI_STEP_SECONDS", "1")
    status, lines = run(checkout, lint="sleep 1000")
    assert status == 1
    assert "=== lint did not end within 1 s" in lines


def test_stopped_run_leaves_nothing_behind(checkout: Path) -> None:
    process = start(checkout, test="echo started; sleep 1000")
    mark = f"MARK_OF_TEST={checkout}"
    try:
        wait_until(lambda: any("sleep 1000" in line for line in processes_with(mark).values()))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 143
        assert processes_with(mark) == {}
    finally:
        process.kill()
        process.wait()


def test_a_known_hole_fails_the_audit_and_a_registry_without_answers_is_said(
    tmp_path: Path,
) -> None:
    hole = '{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}'
    unknown = '{"name": "b", "skip_reason": "not found"}'
    answers = {hole: 1, unknown: 0, f"{hole}, {unknown}": 1}
    said = {}
    for answer, code in answers.items():
        program(tmp_path / "pip-audit", f"echo '{{\"dependencies\": [{answer}]}}'; exit {code}")
        done = subprocess.run(
            [ROOT / ".ci" / "audit", tmp_path / "pip-audit"],
            capture_output=True,
            text=True,
            check=False,
        )
        said[answer] = done.stdout
        assert done.returncode == code, done.stderr
    assert "X-1, fixed in 2" in said[hole]
    assert "NOT AUDITED" in said[unknown]
    program(tmp_path / "pip-audit", "echo no network >&2; exit 1")
    done = subprocess.run([ROOT / ".ci" / "audit", tmp_path / "pip-audit"], check=False)
    assert done.returncode == 2
