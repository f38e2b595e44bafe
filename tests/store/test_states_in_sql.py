"""The statements of the store make no step between states that `relay_queue.states` does not allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import pytest

from relay_queue import store
from relay_queue.states import CANCELLABLE, NOT_ACKED, TRANSITIONS, State, sql_list

STEP = re.compile(
    r"UPDATE relay_queue_job\s+SET state = '(?P<after>\w+)'(?P<rest>.*?)(?:RETURNING|\Z)", re.DOTALL
)
GUARD = re.compile(r"\bstate(?: \|\| '')? (?:= '(?P<one>\w+)'|IN \((?P<some>[^)]*)\)|= %s)")


def statements() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each statement that the modules of the store define."""
    for found in iter_modules(store.__path__):
        module = import_module(f"relay_queue.store.{found.name}")
        for name, text in vars(module).items():
            if name.isupper() and isinstance(text, str):
                yield f"{found.name}.{name}", text


STEPS = [
    (name, found["after"], found["rest"])
    for name, text in statements()
    for found in STEP.finditer(text)
]


def states_before(rest: str) -> set[str]:
    """Return the states that the condition of a statement names."""
    _, where, condition = rest.partition("WHERE")
    assert where, "a statement that moves jobs must name the state that it expects"
    named: set[str] = set()
    for guard in GUARD.finditer(condition):
        named.update(
            [guard["one"]] if guard["one"] else re.findall(r"'(\w+)'", guard["some"] or "")
        )
    return named


def test_the_statements_that_move_jobs_are_found() -> None:
    assert {name for name, _, _ in STEPS} >= {
        "grant.START",
        "operate.CANCEL",
        "operate.REVIVE",
        "operate.RUN_NOW",
        "recover.PROMOTE",
        "settle.SUCCEED",
        "trial.MARK_DEAD",
    }


@pytest.mark.parametrize(("name", "after", "rest"), STEPS, ids=[name for name, _, _ in STEPS])
def test_a_statement_makes_allowed_steps_only(name: str, after: str, rest: str) -> None:
    before = states_before(rest)
    # The one state that is bound as a parameter was read under `CAN_GO_DEAD` just before.
    assert before or name == "trial.MARK_DEAD"
    allowed = {state.value for state in State if after in TRANSITIONS[state]}
    if name == "grant.MARK_TAKEN":
        # It takes a start back that the same statement made: the jobs were ready before it.
        before = {"ready"}
    assert before <= allowed, f"{name} takes jobs from {before - allowed} to {after}"


def test_a_list_for_sql_keeps_the_order_of_the_definition() -> None:
    assert sql_list(CANCELLABLE) == "'scheduled', 'ready', 'running', 'retrying'"
    assert sql_list(NOT_ACKED) == ", ".join(f"'{outcome}'" for outcome in NOT_ACKED)
    assert sql_list(frozenset()) == ""
