"""Arguments and results as people may read them: redacted by name, laid out, cut to a length."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relay_queue.admin import texts

SECRET = "hunter2"


@pytest.mark.parametrize(
    "value",
    [
        {"Password": SECRET},
        {"PASSWORD": [SECRET]},
        {"api-key": SECRET},
        {"API_KEY": {"a": SECRET}},
        {"deep": [{"passWord": SECRET}]},
        {"body": json.dumps({"password": SECRET, "name": "Ada"})},
        {"body": "  " + json.dumps([{"user": {"Api_Key": SECRET}}])},
        {"body": json.dumps({"body": json.dumps({"password": SECRET})})},
        {"body": json.dumps(json.dumps({"password": SECRET}))},
        {"body": json.dumps({"password": SECRET})[:-1]},
        {"body": '{"p\\u0061ssword": "hunter2"}'},
        {"body": json.dumps({"Größe": SECRET})},
        {"body": f"GRÖSSE: {SECRET}"},
        {"body": f"größe={SECRET}"},
        {"body": f"user=ada&password={SECRET}"},
        {"body": f"{{'password': '{SECRET}'}}"},
        {"body": f"Password : {SECRET}"},
    ],
    ids=str,
)
def test_name_hides_its_value_in_any_case_and_in_texts(settings: Any, value: Any) -> None:
    settings.RELAY = {"REDACT": ["password", "api_key", "Größe"]}
    kwargs = json.dumps({"args": [], "kwargs": {**value, "seen": "Grace"}})
    shown = texts.arguments("no.task", kwargs)
    assert SECRET not in shown
    assert "Grace" in shown
    assert SECRET not in texts.result("no.task", json.dumps(value))
    assert SECRET not in json.dumps(texts.Redactor(("password", "api_key", "Größe")).all(value))


def test_text_without_a_name_stays_as_it_is(settings: Any) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    for text in ('{"name": "Ada"}', "see: the password", "Größe", '["password"]'):
        shown = texts.result("no.task", json.dumps([text]))
        assert json.loads(shown) == [text]


class _Task:
    def __init__(self, func: Callable[..., Any], *, takes_context: bool = False) -> None:
        self.func, self.takes_context = func, takes_context


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("connection", *args, **kwargs)

    return wrapper


def _unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def _sends(connection: Any, password: Any, name: Any = "") -> None: ...


def _logs_in(context: Any, password: Any) -> None: ...


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Return what makes a task of this module of a function."""

    def make(task: Any) -> str:
        monkeypatch.setattr(sys.modules[__name__], "made", task, raising=False)
        return f"{__name__}.made"

    return make


@pytest.mark.parametrize(
    "task",
    [
        _Task(_wrapped(_sends)),
        _Task(_wrapped(_wrapped(_sends))),
        _Task(_unmarked(_sends)),
        _Task(functools.partial(_sends, "connection")),
        _Task(_logs_in, takes_context=True),
        _Task(_unmarked(_logs_in), takes_context=True),
        _Task(_wrapped(_logs_in), takes_context=True),
    ],
)
def test_positional_secret_is_hidden_through_wrappers(
    settings: Any, put: Callable[[Any], str], task: Any
) -> None:
    settings.RELAY = {"REDACT": ["PASSWORD"]}
    shown = texts.arguments(put(task), json.dumps({"args": [SECRET], "kwargs": {}}))
    assert SECRET not in shown


def test_positional_arguments_of_a_wrapped_function_without_the_name_are_shown(
    settings: Any, put: Callable[[Any], str]
) -> None:
    settings.RELAY = {"REDACT": ["token"]}
    payload = json.dumps({"args": ["Ada"], "kwargs": {}})
    assert "Ada" in texts.arguments(put(_Task(_wrapped(_sends))), payload)


def test_wrappers_in_a_circle_hide_all(settings: Any, put: Callable[[Any], str]) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    one = _unmarked(_sends)
    one.__wrapped__ = one  # type: ignore[attr-defined]
    layers = list(texts._layers(put(_Task(one))))
    assert len(layers) == texts.MOST_LAYERS


class _Counted(list[Any]):
    """A list that counts the items that were asked of it."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            type(self).asked += 1
            yield item


def test_nothing_behind_the_limit_is_laid_out_or_looked_at() -> None:
    value = _Counted([[]] * 300_000)
    shown = texts._cut(texts.pieces(value, texts.Redactor(("password",))))
    assert len(shown) < texts.MOST_SHOWN_CHARS + 100
    assert shown.endswith("only 20,000 characters are shown")
    assert _Counted.asked < texts.MOST_SHOWN_CHARS


def test_very_many_hidden_arguments_are_worded_once(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    worded: list[str] = []

    def word() -> str:
        worded.append("(hidden)")
        return worded[-1]

    monkeypatch.setattr(texts, "hidden", word)
    shown = texts.arguments("no.task", json.dumps({"args": [SECRET] * 10_000, "kwargs": {}}))
    assert SECRET not in shown
    assert len(worded) == 1


@pytest.mark.parametrize(
    "value",
    [[], {}, None, 1, "text", [[]], {"a": {}}, {"a": [1, {"b": None}], "ü": [True, 1.5, "ß\n"]}],
    ids=str,
)
def test_layout_is_that_of_json(value: Any) -> None:
    wanted = json.dumps(value, indent=2, ensure_ascii=False)
    assert texts.result("no.task", json.dumps(value)) == wanted


@pytest.mark.parametrize("text", ["[" * 100_000, '{"args": [', "hunter2"])
def test_text_that_was_altered_is_shown_only_where_nothing_is_secret(
    settings: Any, text: str
) -> None:
    assert texts.arguments("no.task", text)[:20] == text[:20]
    for relay in ({"REDACT": ["password"]}, {"FORMATTER": "tests.admin.shown.shouted"}):
        settings.RELAY = relay
        assert "not readable" in texts.arguments("no.task", text)
