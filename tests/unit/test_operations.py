"""The table of operations agrees with the states, the permissions, the commands and the front door."""

from __future__ import annotations

import argparse

import pytest
from django.apps import apps

import relay_queue
from relay_queue import operations, states
from relay_queue.cli import base
from relay_queue.operations import JOB_OPERATIONS, JobOperation, Operation

TABLES = (
    *operations.JOB_OPERATIONS,
    *operations.QUEUE_OPERATIONS,
    operations.SET_LIMITS,
    operations.RERANK,
    *operations.WORKER_OPERATIONS,
)
COMMANDS = [operation for operation in TABLES if operation.command]

every_operation = pytest.mark.parametrize("operation", TABLES, ids=lambda op: op.done)
every_command = pytest.mark.parametrize("operation", COMMANDS, ids=lambda op: op.command)
on_jobs = pytest.mark.parametrize("operation", JOB_OPERATIONS, ids=lambda op: op.command)


def test_every_operation_of_the_module_is_in_a_table() -> None:
    defined = [value for value in vars(operations).values() if isinstance(value, Operation)]
    assert {id(operation) for operation in defined} == {id(operation) for operation in TABLES}


@on_jobs
def test_an_operation_moves_jobs_only_as_the_states_allow(operation: JobOperation) -> None:
    assert operation.states
    if operation.to is not None:
        assert all(states.can(state, operation.to) for state in operation.states)
    # It moves, deletes, or changes a number; one of them and no more.
    assert [operation.to is None, not operation.deletes, operation.number is None].count(False) == 1


@on_jobs
def test_buttons_share_out_the_states_of_their_operation(operation: JobOperation) -> None:
    shares = [button.states or operation.states for button in operation.buttons]
    assert frozenset().union(*shares) == operation.states
    assert sum(map(len, shares)) == len(operation.states)


@every_operation
def test_a_button_asks_for_a_permission_that_there_is(operation: Operation) -> None:
    models = apps.get_app_config("relay_queue").get_models()
    known = {codename for model in models for codename, _ in model._meta.permissions}
    assert {button.permission for button in operation.buttons} <= known


def test_names_of_buttons_are_unique_within_a_table() -> None:
    for table in (JOB_OPERATIONS, operations.QUEUE_OPERATIONS, operations.WORKER_OPERATIONS):
        names = [button.name for operation in table for button in operation.buttons]
        assert len(names) == len(set(names))


@every_command
def test_an_operation_is_a_verb_of_the_command_line(operation: Operation) -> None:
    assert base.VERBS[operation.command] == operation.summary
    verb = base.load(operation.command)
    assert operation.help == verb.help
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    assert "--json" in parser.format_help()


@on_jobs
def test_an_operation_on_jobs_is_a_function_of_the_front_door(operation: JobOperation) -> None:
    name = {"priority": "set_priority"}.get(operation.command, operation.command.replace("-", "_"))
    for form in (name, f"{name}_many", f"a{name}", f"a{name}_many"):
        assert form in relay_queue.__all__
