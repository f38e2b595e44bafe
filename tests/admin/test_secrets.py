"""What callers and functions wrote is shown to those who may view it, and found by nobody else."""

from __future__ import annotations

import functools
import html
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from relay_queue import store
from relay_queue.admin import redacting
from relay_queue.admin.jobpage import payloads
from relay_queue.admin.redacting import Redactor
from relay_queue.models import BulkAct, Job, Lease
from relay_queue.store import NewBulkAct
from tests.store import actions

pytestmark = pytest.mark.django_db

SITE = "/admin/relay_queue/"
SECRET = "hunter2"
LEDGER = ("view_job", "view_lease", "view_worker", "view_queue")


def viewer(*codenames: str) -> Client:
    """Return the browser of somebody who has these permissions and no other."""
    user = User.objects.create_user(f"viewer {'-'.join(codenames)}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def page(client: Client, path: str) -> str:
    response = client.get(SITE + path, follow=True)
    assert response.status_code == 200, response.status_code
    return html.unescape(response.content.decode())


@pytest.fixture
def job() -> Job:
    """Let a job fail with its argument in its key, its message and its traceback."""
    worker = actions.register(name="anna")
    new = actions.job(args=(SECRET,), idempotency_key=f"user-{SECRET}")
    actions.do(store.enqueue, new)
    (held,) = actions.claim(1, worker_id=worker)
    actions.nack(
        held,
        fatal=True,
        error="shop.errors.Refused",
        message=f"Refused: {SECRET} is no password",
        traceback=f"password = '{SECRET}'",
    )
    return Job.objects.get(pk=held.job_id)


def everywhere(job: Job) -> list[str]:
    """Return the pages on which something of a job stands."""
    lease = Lease.objects.get(job=job)
    return [
        *(f"job/{job.pk}/change/", "job/", "deadletter/", "retry/", f"job/?q=id:{job.pk}"),
        *("lease/", f"lease/{lease.pk}/change/", f"worker/{lease.worker_id}/change/"),
        *("queue/default/change/", f"job/{job.pk}/history/"),
    ]


def test_without_view_payload_no_page_shows_what_was_written(job: Job) -> None:
    client = viewer(*LEDGER, "view_bulkact", "view_dashboard")
    for path in [*everywhere(job), "dashboard/", "bulkact/"]:
        assert SECRET not in page(client, path), path
    assert "Refused" in page(client, f"job/{job.pk}/change/"), "the class is a name in the code"
    assert "Refused" in page(client, "deadletter/")


def test_with_view_payload_all_of_it_is_shown(job: Job) -> None:
    client = viewer(*LEDGER, "view_payload")
    shown = page(client, f"job/{job.pk}/change/")
    for text in (f'"{SECRET}"', f"user-{SECRET}", "no password", f"password = '{SECRET}'"):
        assert text in shown
    assert "no password" in page(client, "deadletter/")
    assert "no password" in page(client, "job/")
    assert SECRET in page(client, f"lease/{Lease.objects.get().pk}/change/")


@pytest.mark.parametrize("query", ["key:user-{}", "error:{}", " ERROR : {}", "error:", "key:"])
@pytest.mark.parametrize("where", ["job/", "deadletter/"])
def test_search_by_what_may_not_be_viewed_finds_nothing_and_says_why(
    job: Job, query: str, where: str
) -> None:
    query = query.format(SECRET)
    client = viewer(*LEDGER)
    response = client.get(SITE + where, {"q": query})
    assert response.context["cl"].result_count == 0
    assert "You may not search by" in response.content.decode()
    missing = client.get(SITE + where, {"q": query.replace(SECRET, "nothing")})
    assert "You may not search by" in missing.content.decode(), "a hit and a miss look alike"
    found = viewer(*LEDGER, "view_payload").get(SITE + where, {"q": query})
    assert found.context["cl"].result_count == (1 if SECRET in query else 0)


def test_search_that_was_refused_is_no_way_to_act_on_anything(job: Job) -> None:
    client = viewer(*LEDGER, "requeue_job")
    data = {"action": "requeue", "select_across": "1", "_selected_action": "0"}
    question = client.post(f"{SITE}job/?q=error:{SECRET}", data)
    assert question.context["count"] == 0


def test_filters_of_bulk_acts_tell_no_text_that_was_searched_for(job: Job) -> None:
    for kind in ("error", "key"):
        new = NewBulkAct(
            *(kind, "cancel", None, "relay_queue.job", f"q={kind}:{SECRET}&queue=default"),
            *("UTC", "en", 9, 1, "0", "ada", "admin"),
        )
        actions.do(store.start_bulk, new)
    client, other = viewer("view_bulkact"), viewer("view_bulkact", "view_payload")
    for path in ("bulkact/", *(f"bulkact/{row.pk}/change/" for row in BulkAct.objects.all())):
        assert SECRET not in page(client, path)
        assert "queue: default" in page(client, path)
        assert SECRET in page(other, path)


def test_bulk_act_of_a_search_that_is_not_allowed_any_more_is_stopped(job: Job) -> None:
    from relay_queue.admin.acts import catalogue, matching

    client = viewer(*LEDGER, "requeue_job")
    user = User.objects.get()
    new = NewBulkAct(
        *("n", "requeue", None, "relay_queue.job", f"q=error:{SECRET}", "UTC", "en", 9, 1),
        *(str(user.pk), "ada", "admin"),
    )
    act = catalogue.job_act("requeue")
    assert act is not None
    with pytest.raises(matching.Stopped, match="refuses the search"):
        matching.rows_of(new, act)
    assert client


def test_lists_show_what_the_ledger_tells_to_those_who_may_view_leases(job: Job) -> None:
    client = viewer("view_job")
    for path in ("job/", "deadletter/", "retry/"):
        found = client.get(SITE + path).context["cl"]
        assert not {"verdict", "last_attempt"} & set(found.list_display)
        assert "anna" not in page(client, path)
        assert "Refused" not in page(client, path)
    assert client.get(f"{SITE}job/?verdict=once").status_code == 400
    shown = page(client, f"job/{job.pk}/change/")
    for text in ("anna", "Ran once", "Refused", "Last attempt took"):
        assert text not in shown


def test_names_of_workers_are_shown_to_those_who_may_view_workers(job: Job) -> None:
    lease = Lease.objects.get()
    client, other = viewer("view_job", "view_lease"), viewer(*LEDGER)
    for path in (
        "job/",
        "deadletter/",
        "lease/",
        f"job/{job.pk}/change/",
        f"lease/{lease.pk}/change/",
    ):
        shown = page(client, path)
        assert "anna" not in shown, path
        assert f"#{lease.worker_id}" in shown, path
        assert "anna" in page(other, path), path
    assert client.get(f"{SITE}job/?verdict=once").context["cl"].result_count == 1


@pytest.mark.parametrize("kind", ["ERROR", "TRACEBACK", "ARGUMENTS"])
def test_formatter_of_the_project_words_what_is_shown(job: Job, settings: Any, kind: str) -> None:
    settings.RELAY = {"FORMATTER": "tests.admin.shown.shouted", "REDACT": ["password"]}
    shown = page(viewer(*LEDGER, "view_payload"), f"job/{job.pk}/change/")
    assert f"<{kind} OF TESTS.TASKS.ANYTHING" in shown
    assert SECRET not in shown.replace(f"user-{SECRET}", "")


@pytest.mark.parametrize(
    ("path", "raised"),
    [
        ("tests.admin.shown.fails", "ValueError"),
        ("tests.admin.shown.nothing", "TypeError"),
        ("tests.admin.shown.missing", "ImportError"),
        ("nowhere.at.all", "ModuleNotFoundError"),
    ],
)
def test_error_in_the_formatter_breaks_no_page_and_shows_nothing_that_was_written(
    job: Job, settings: Any, path: str, raised: str
) -> None:
    settings.RELAY = {"FORMATTER": path}
    client = viewer(*LEDGER, "view_payload")
    for where in everywhere(job):
        shown = page(client, where)
        assert SECRET not in shown.replace(f"user-{SECRET}", ""), where
    assert f"{path}, raised {raised})" in page(client, f"job/{job.pk}/change/")
    assert f"{path}, raised {raised})" in page(client, "deadletter/")


def test_formatter_shows_nothing_to_those_who_may_not_view_it(job: Job, settings: Any) -> None:
    settings.RELAY = {"FORMATTER": "tests.admin.shown.shouted"}
    client = viewer(*LEDGER)
    for path in everywhere(job):
        assert SECRET.upper() not in page(client, path)


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
        {"body": f"user=ada&password={SECRET}"},
        {"body": f"{{'password': '{SECRET}'}}"},
        {"body": f"Password : {SECRET}"},
    ],
    ids=str,
)
def test_name_hides_its_value_in_any_case_and_in_texts(settings: Any, value: Any) -> None:
    settings.RELAY = {"REDACT": ["password", "api_key"]}
    kwargs = json.dumps({"args": [], "kwargs": {**value, "seen": "Grace"}})
    shown = payloads.arguments("no.task", kwargs)
    assert SECRET not in shown
    assert "Grace" in shown
    assert SECRET not in payloads.result("no.task", json.dumps(value))
    assert SECRET not in json.dumps(Redactor(("password", "api_key")).all(value))


def test_text_without_a_name_stays_as_it_is(settings: Any) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    for text in ('{"name": "Ada"}', "see: the password", "Größe", '["password"]'):
        shown = payloads.result("no.task", json.dumps([text]))
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
    shown = payloads.arguments(put(task), json.dumps({"args": [SECRET], "kwargs": {}}))
    assert SECRET not in shown


def test_positional_arguments_of_a_wrapped_function_without_the_name_are_shown(
    settings: Any, put: Callable[[Any], str]
) -> None:
    settings.RELAY = {"REDACT": ["token"]}
    payload = json.dumps({"args": ["Ada"], "kwargs": {}})
    assert "Ada" in payloads.arguments(put(_Task(_wrapped(_sends))), payload)


def test_wrappers_in_a_circle_hide_all(settings: Any, put: Callable[[Any], str]) -> None:
    settings.RELAY = {"REDACT": ["password"]}
    one = _unmarked(_sends)
    one.__wrapped__ = one  # type: ignore[attr-defined]
    layers = list(redacting._layers(put(_Task(one))))
    assert len(layers) == redacting.MOST_LAYERS


class _Counted(list[Any]):
    """A list that counts the items that were asked of it."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            type(self).asked += 1
            yield item


def test_nothing_behind_the_limit_is_laid_out_or_looked_at() -> None:
    value = _Counted([[]] * 300_000)
    shown = payloads._cut(payloads.pieces(value, Redactor(("password",))))
    assert len(shown) < payloads.MOST_SHOWN_CHARS + 100
    assert shown.endswith("only 20,000 characters are shown")
    assert _Counted.asked < payloads.MOST_SHOWN_CHARS


@pytest.mark.parametrize(
    "value",
    [[], {}, None, 1, "text", [[]], {"a": {}}, {"a": [1, {"b": None}], "ü": [True, 1.5, "ß\n"]}],
    ids=str,
)
def test_layout_is_that_of_json(value: Any) -> None:
    wanted = json.dumps(value, indent=2, ensure_ascii=False)
    assert payloads.result("no.task", json.dumps(value)) == wanted


@pytest.mark.parametrize("text", ["[" * 100_000, '{"args": [', "hunter2"])
def test_text_that_was_altered_is_shown_only_where_nothing_is_secret(
    settings: Any, text: str
) -> None:
    assert payloads.arguments("no.task", text)[:20] == text[:20]
    for relay in ({"REDACT": ["password"]}, {"FORMATTER": "tests.admin.shown.shouted"}):
        settings.RELAY = relay
        assert "not readable" in payloads.arguments("no.task", text)
