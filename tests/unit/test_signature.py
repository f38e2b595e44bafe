"""Arguments are checked against the function before a job is stored."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from relay_queue import enqueue_many
from relay_queue.exceptions import InvalidJob, PayloadError
from relay_queue.models import Job
from relay_queue.task import require_callable_with
from tests import tasks


def plain(a: int, b: int = 0) -> None: ...
def nothing() -> None: ...
def by_name(a: int, *, b: int, c: int = 0) -> None: ...
def by_place(a: int, b: int = 0, /, c: int = 0) -> None: ...
def many(a: int, *rest: int) -> None: ...
def any_name(a: int, **rest: int) -> None: ...
def place_and_name(a: int, /, **rest: int) -> None: ...
def anything(*args: int, **kwargs: int) -> None: ...
def with_context(context: Any, a: int) -> None: ...


@wraps(plain)
def wrapper(*args: int) -> None:
    plain(*args, 5)


CALLS = [
    *[(plain, args, kwargs) for args in [(), (1,), (1, 2), (1, 2, 3)] for kwargs in [{}, {"b": 1}]],
    *[(plain, (), names) for names in [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "x": 2}]],
    *[(nothing, args, kwargs) for args in [(), (1,)] for kwargs in [{}, {"a": 1}]],
    *[(by_name, (1,), names) for names in [{}, {"b": 1}, {"b": 1, "c": 2}, {"c": 1}, {"a": 1}]],
    *[(by_name, (), {"a": 1, "b": 2}), (by_name, (1, 2), {"b": 1})],
    *[(by_place, args, names) for args in [(), (1,), (1, 2)] for names in [{}, {"a": 1}, {"c": 1}]],
    *[(many, args, names) for args in [(), (1,), (1, 2, 3)] for names in [{}, {"a": 1}]],
    *[(any_name, args, names) for args in [(), (1,)] for names in [{}, {"a": 1}, {"z": 1}]],
    # Not () with a=1, which Python 3.13's own bind lets pass: the worker finds that one.
    *[(place_and_name, (), {}), (place_and_name, (1,), {}), (place_and_name, (1,), {"a": 1})],
    *[(anything, args, names) for args in [(), (1, 2)] for names in [{}, {"z": 1}]],
    *[(wrapper, args, {}) for args in [(1,), (1, 2, 3)]],
]


def task_of(function: Any, takes_context: bool = False) -> Any:
    return SimpleNamespace(func=function, takes_context=takes_context, module_path="app.tasks.f")


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_what_python_would_refuse_is_refused_and_nothing_else(
    function: Any, args: Any, kwargs: Any
) -> None:
    try:
        (function if function is not wrapper else anything)(*args, **kwargs)
    except TypeError:
        with pytest.raises(PayloadError, match=r"app\.tasks\.f\(.*cannot be called so"):
            require_callable_with(task_of(function), args, kwargs)
    else:
        require_callable_with(task_of(function), args, kwargs)


def test_the_context_is_no_argument_of_the_caller() -> None:
    task = task_of(with_context, takes_context=True)
    require_callable_with(task, (1,), {})
    with pytest.raises(PayloadError, match=r"app\.tasks\.f\(a\).*missing a required argument: 'a'"):
        require_callable_with(task, (), {})


@pytest.mark.django_db
def test_a_call_that_the_function_would_refuse_is_not_stored() -> None:
    with pytest.raises(TypeError, match=r"tests\.tasks\.add\(left, right=0\).*'rigth'"):
        tasks.add.enqueue(1, rigth=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidJob, match="too many positional arguments"):
        enqueue_many([tasks.add.bind(1), tasks.add.bind(1, 2, 3)])  # type: ignore[call-arg]
    assert not Job.objects.exists()
