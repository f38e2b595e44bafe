"""Acts on one row and on a selection: who may, what happens, what is said, what is written down."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import OperationalError
from django.test import Client

from relay_queue import store
from relay_queue.admin.actions import perform
from relay_queue.admin.actions.catalogue import (
    JOB_ACTIONS,
    QUEUE_ACTIONS,
    WORKER_ACTIONS,
    JobAction,
)
from relay_queue.exceptions import QueueFull
from relay_queue.models import Job, Queue, Worker
from relay_queue.states import State
from tests.admin.acting import entries, job_in, person, said
from tests.store import actions

pytestmark = pytest.mark.django_db

ENDS = {
    "retry_now": "ready",
    "requeue": "ready",
    "run_now": "ready",
    "prioritise": "ready",
    "release": "ready",
    "cancel": "cancelled",
    "discard": None,
}
STARTS = {
    "retry_now": "retrying",
    "requeue": "dead",
    "run_now": "scheduled",
    "prioritise": "ready",
    "release": "running",
    "cancel": "running",
    "discard": "dead",
}
ACTS = {act.name: act for act in JOB_ACTIONS}
YES = {"confirmed": "yes", "priority": "7"}


def url(job_id: int, act: str) -> str:
    return f"/admin/relay_queue/job/{job_id}/act/{act}/"


def state_of(job_id: int) -> str | None:
    return Job.objects.filter(pk=job_id).values_list("state", flat=True).first()


# --- One job --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTS)
def test_act_on_one_job_is_done_and_written_down(name: str) -> None:
    client = person(ACTS[name].permission)
    job_id = job_in(STARTS[name])
    response = client.post(url(job_id, name), YES)
    assert response.status_code == 302
    assert state_of(job_id) == ENDS[name]
    assert "done for 1 job" in said(response)
    (entry,) = entries()
    assert (entry["user"], entry["model"], entry["key"]) == ("operator", "job", str(job_id))
    assert entry["flag"] == (DELETION if name == "discard" else CHANGE)
    assert entry["relay"]["act"] == name
    actions.assert_counters_exact()


def test_audit_says_what_changed_in_words_and_for_programs() -> None:
    client = person("requeue_job", "prioritise_job")
    job_id = job_in("dead")
    client.post(url(job_id, "requeue"))
    client.post(url(job_id, "prioritise"), YES)
    first, second = entries()
    assert first["shown"] == "Changed state from dead to ready (requeue)."
    assert second["shown"] == "Changed priority to 7 (prioritise)."
    assert second["relay"] == {"act": "prioritise", "priority": 7}
    history = client.get(f"/admin/relay_queue/job/{job_id}/history/").content.decode()
    assert "Changed state from dead to ready (requeue)." in history


@pytest.mark.parametrize("name", ACTS)
def test_act_without_its_permission_is_denied(name: str) -> None:
    others = {act.permission for act in JOB_ACTIONS} - {ACTS[name].permission}
    client = person(*others)
    job_id = job_in(STARTS[name])
    assert client.post(url(job_id, name), YES).status_code == 403
    assert state_of(job_id) == STARTS[name]
    assert not LogEntry.objects.exists()


def test_act_on_what_one_may_not_see_is_denied(admin_user: Any) -> None:
    client = person("cancel_job")
    user = type(admin_user).objects.get(username="operator")
    user.user_permissions.remove(user.user_permissions.get(codename="view_job"))
    job_id = job_in("ready")
    assert client.post(url(job_id, "cancel"), YES).status_code == 403
    assert state_of(job_id) == "ready"


def test_stranger_is_sent_to_the_login() -> None:
    job_id = job_in("ready")
    response = Client().post(url(job_id, "cancel"), YES)
    assert response.status_code == 302
    assert "/login/" in response["Location"]
    assert state_of(job_id) == "ready"


@pytest.mark.parametrize("name", ACTS)
def test_nothing_is_changed_by_get(name: str) -> None:
    client = person(ACTS[name].permission)
    job_id = job_in(STARTS[name])
    response = client.get(url(job_id, name), YES)
    assert response["Location"] == f"/admin/relay_queue/job/{job_id}/change/"
    assert "Nothing was done" in said(response)
    assert client.put(url(job_id, name)).status_code == 405
    assert state_of(job_id) == STARTS[name]


def test_post_without_the_csrf_token_is_refused() -> None:
    client = person("cancel_job", "limit_queue", "stop_worker", enforce_csrf=True)
    job_id, worker_id = job_in("ready"), actions.register()
    selected = {"action": "cancel", "_selected_action": [job_id], **YES}
    for path, data in (
        (url(job_id, "cancel"), YES),
        ("/admin/relay_queue/job/", selected),
        ("/admin/relay_queue/queue/ready/limits/", {"capacity": 1}),
        (f"/admin/relay_queue/worker/{worker_id}/act/stop/", YES),
    ):
        assert client.post(path, data).status_code == 403, path
    assert state_of(job_id) == "ready"
    assert Queue.objects.get(name="ready").capacity is None
    assert Worker.objects.get(pk=worker_id).ordered == ""


@pytest.mark.parametrize("name", [act.name for act in JOB_ACTIONS if act.dangerous])
def test_destructive_act_asks_first(name: str) -> None:
    client = person(ACTS[name].permission)
    job_id = job_in(STARTS[name])
    response = client.post(url(job_id, name))
    assert response.status_code == 200
    assert str(ACTS[name].effect) in response.content.decode()
    assert state_of(job_id) == STARTS[name]


@pytest.mark.parametrize("priority", ["", "high", "101"])
def test_priority_that_makes_no_sense_is_asked_for_again(priority: str) -> None:
    client = person("prioritise_job")
    job_id = job_in("ready")
    response = client.post(url(job_id, "prioritise"), {"confirmed": "yes", "priority": priority})
    assert response.status_code == 200
    assert response.context["form"].errors
    assert actions.read(job_id).priority == 0


@pytest.mark.parametrize("name", ACTS)
def test_act_that_lost_a_race_says_so(name: str) -> None:
    client = person(ACTS[name].permission)
    found = next(s for s in ("succeeded", "running", "ready") if s not in ACTS[name].states)
    job_id = job_in(found)
    response = client.post(url(job_id, name), YES)
    assert response.status_code == 302
    assert f"job {job_id}. It has moved on already: it is {found} now." in said(response)
    assert state_of(job_id) == found
    assert not LogEntry.objects.exists()


def test_act_on_a_job_that_is_gone_says_so() -> None:
    client = person("cancel_job")
    response = client.post(url(404, "cancel"), YES)
    assert response.status_code == 302
    assert "Job 404 is not there any more" in said(response)


@pytest.mark.parametrize("path", ["job/nonsense/act/cancel/", "job/1/act/nonsense/"])
def test_nonsense_in_the_address_is_no_error_of_ours(path: str) -> None:
    client = person("cancel_job")
    job_in("ready")
    assert client.post(f"/admin/relay_queue/{path}", YES).status_code in {302, 404}


def test_full_queue_is_named_and_nothing_is_changed() -> None:
    client = person("requeue_job")
    job_id = job_in("dead")
    actions.do(store.set_limits, "dead", capacity=0, max_running=None)
    response = client.post(url(job_id, "requeue"))
    assert "Nothing was changed: queue 'dead' is full" in said(response)
    assert state_of(job_id) == "dead"
    assert not LogEntry.objects.exists()


def test_busy_database_is_named_and_other_errors_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = person("cancel_job")
    job_id = job_in("ready")

    class Busy:
        @staticmethod
        def diagnose(error: Exception) -> str:
            return "busy" if "locked" in str(error) else "unknown"

    def fail(*_: Any, **__: Any) -> Any:
        raise OperationalError(text)

    monkeypatch.setattr(perform, "dialect_for", lambda connection: Busy)
    monkeypatch.setattr(perform.store, "transaction", fail)
    text = "database is locked"
    assert "the database is busy" in said(client.post(url(job_id, "cancel"), YES))
    text = "disk I/O error"
    with pytest.raises(OperationalError):
        client.post(url(job_id, "cancel"), YES)


# --- The page of a job ----------------------------------------------------------------------


@pytest.mark.parametrize("state", [state.value for state in State])
def test_buttons_are_enabled_by_the_state_and_say_why_not(state: str) -> None:
    client = person(*{act.permission for act in JOB_ACTIONS})
    response = client.get(f"/admin/relay_queue/job/{job_in(state)}/change/")
    buttons = {button.name: button for button in response.context["relay_acts"]}
    assert {name for name, b in buttons.items() if not b.why_not} == {
        act.name for act in JOB_ACTIONS if state in act.states
    }
    page = response.content.decode()
    for name, button in buttons.items():
        if button.why_not:
            assert f'aria-describedby="relay-why-{name}"' in page
            assert f'id="relay-why-{name}">{button.why_not}' in page


def test_buttons_are_only_there_for_what_one_may_do() -> None:
    job_id = job_in("dead")
    response = person("discard_job").get(f"/admin/relay_queue/job/{job_id}/change/")
    assert [button.name for button in response.context["relay_acts"]] == ["discard"]
    response = person(name="reader").get(f"/admin/relay_queue/job/{job_id}/change/")
    assert "relay-acts" not in response.content.decode().replace("relay_acts", "")


# --- A selection ----------------------------------------------------------------------------


def select(client: Client, act: str, job_ids: list[int], query: str = "", **more: Any) -> Any:
    data = {"action": act, "_selected_action": job_ids, "index": "0", **more}
    if "confirmed" in more:
        del data["index"]
    return client.post(f"/admin/relay_queue/job/{query}", data)


def test_act_on_a_selection_changes_what_it_can_and_names_the_others() -> None:
    client = person("requeue_job")
    dead, running = [job_in("dead"), job_in("dead")], job_in("running")
    response = select(client, "requeue", [*dead, running, 404])
    assert [state_of(job_id) for job_id in dead] == ["ready", "ready"]
    told = said(response)
    assert "done for 2 jobs" in told
    assert f"job {running}. It has moved on already: it is running now." in told
    assert "job 404. It is not there any more." in told
    assert [entry["key"] for entry in entries()] == [str(job_id) for job_id in dead]


def test_selected_job_that_has_left_the_filter_meanwhile_is_named() -> None:
    client = person("requeue_job")
    job_id = job_in("dead")
    actions.do(store.requeue, [job_id])
    response = select(client, "requeue", [job_id], "?state__exact=dead")
    assert "It has moved on already: it is ready now." in said(response)


def test_selected_dead_letter_that_was_retried_meanwhile_is_named() -> None:
    client = person("requeue_job")
    job_id, other = job_in("dead"), job_in("dead")
    actions.do(store.requeue, [job_id])
    data = {"action": "requeue", "_selected_action": [job_id, other], "index": "0"}
    told = said(client.post("/admin/relay_queue/deadletter/", data))
    assert f"job {job_id}. It has moved on already: it is ready now." in told
    assert state_of(other) == "ready"
    assert {entry["model"] for entry in entries()} == {"job"}


def test_many_that_were_left_alone_are_counted() -> None:
    client = person("requeue_job")
    job_ids = [job_in("ready") for _ in range(perform.MOST_NAMED + 3)]
    assert "nothing was done to 3 more" in said(select(client, "requeue", job_ids))


def test_destructive_act_on_a_selection_asks_first_and_then_does_it() -> None:
    client = person("cancel_job")
    job_ids = [job_in("ready"), job_in("scheduled")]
    response = select(client, "cancel", job_ids)
    assert response.status_code == 200
    assert response.context["count"] == 2
    assert {state_of(job_id) for job_id in job_ids} == {"ready", "scheduled"}
    data = dict(response.context["hidden"])
    assert data["confirmed"] == "yes"
    assert select(client, "cancel", job_ids, **YES).status_code == 302
    assert {state_of(job_id) for job_id in job_ids} == {"cancelled"}


def test_acts_are_offered_and_accepted_only_with_their_permission() -> None:
    client = person("cancel_job")
    job_id = job_in("dead")
    page = client.get("/admin/relay_queue/job/").content.decode()
    assert '<option value="cancel">' in page
    assert '<option value="discard">' not in page
    select(client, "discard", [job_id], **YES)
    assert state_of(job_id) == "dead"


def test_audit_is_written_after_the_commit_if_people_live_elsewhere(
    monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    client = person("cancel_job")
    job_id = job_in("ready")
    monkeypatch.setattr(
        "relay_queue.admin.actions.perform.router.db_for_write", lambda *_: "elsewhere"
    )
    with django_capture_on_commit_callbacks() as callbacks:
        client.post(url(job_id, "cancel"), YES)
    assert state_of(job_id) == "cancelled"
    assert not LogEntry.objects.exists()
    monkeypatch.undo()
    for callback in callbacks:
        callback()
    assert [entry["relay"]["act"] for entry in entries()] == ["cancel"]


def test_audit_and_act_are_one_where_they_share_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = job_in("ready")

    def refuse(*_: Any, **__: Any) -> None:
        raise QueueFull("audit", 0)

    monkeypatch.setattr("relay_queue.admin.actions.perform.record", refuse)
    with pytest.raises(QueueFull):
        perform.perform(ACTS["cancel"], 1, Job, [job_id], {})
    assert state_of(job_id) == "ready"


# --- Queues and workers ---------------------------------------------------------------------


def test_queue_is_paused_and_resumed() -> None:
    client = person("pause_queue")
    actions.enqueue(queue="a/b mail")
    page = "/admin/relay_queue/queue/a_2Fb mail"
    client.post(f"{page}/act/pause/")
    assert actions.claim(1, "a/b mail") == []
    buttons = client.get(f"{page}/change/").context["relay_acts"]
    assert [(b.name, bool(b.why_not)) for b in buttons] == [("pause", True), ("resume", False)]
    client.post(f"{page}/act/resume/")
    assert len(actions.claim(1, "a/b mail")) == 1
    assert [entry["relay"]["act"] for entry in entries()] == ["pause", "resume"]
    assert {entry["key"] for entry in entries()} == {"a/b mail"}


def test_queue_that_somebody_else_has_paused_or_opened_is_named_and_not_written_down() -> None:
    job_in("ready")
    client = person("pause_queue")
    address = "/admin/relay_queue/queue/ready/act/{}/"
    assert "It is not paused." in said(client.post(address.format("resume")))
    client.post(address.format("pause"))
    assert "It is paused already." in said(client.post(address.format("pause")))
    assert [entry["relay"]["act"] for entry in entries()] == ["pause"]


def test_selected_queues_are_paused() -> None:
    client = person("pause_queue")
    actions.enqueue(queue="a"), actions.enqueue(queue="b"), actions.enqueue(queue="c")
    data = {"action": "pause", "_selected_action": ["a", "b"], "index": "0"}
    client.post("/admin/relay_queue/queue/", data)
    paused = Queue.objects.filter(paused_at__isnull=False).values_list("name", flat=True)
    assert sorted(paused) == ["a", "b"]


def test_a_queue_without_jobs_is_deleted_after_a_question_and_one_with_jobs_says_why_not() -> None:
    client = person("delete_queue")
    actions.enqueue(queue="full")
    actions.do(store.ensure_queue, "mail")
    page = "/admin/relay_queue/queue/mail"
    (button,) = client.get(f"{page}/change/").context["relay_acts"]
    assert (button.name, button.dangerous, button.why_not) == ("delete_queue", True, "")
    assert client.post(f"{page}/act/delete_queue/").status_code == 200, "it asks"
    assert Queue.objects.filter(pk="mail").exists()
    response = client.post(f"{page}/act/delete_queue/", YES)
    assert response.url == "/admin/relay_queue/queue/"
    assert not Queue.objects.filter(pk="mail").exists()
    (button,) = client.get("/admin/relay_queue/queue/full/change/").context["relay_acts"]
    assert "has no job" in str(button.why_not)
    text = said(client.post("/admin/relay_queue/queue/full/act/delete_queue/", YES))
    assert "it has 1 ready" in text
    assert [entry["key"] for entry in entries()] == ["mail"]
    assert Queue.objects.filter(pk="full").exists()


def test_of_selected_queues_those_without_jobs_are_deleted() -> None:
    client = person("delete_queue")
    actions.enqueue(queue="full")
    actions.do(store.ensure_queue, "a"), actions.do(store.ensure_queue, "b")
    data = {"action": "delete_queue", "_selected_action": ["a", "full", "b"], "index": "0"}
    response = client.post("/admin/relay_queue/queue/", {**data, **YES})
    assert "it has 1 ready" in said(response)
    assert list(Queue.objects.values_list("name", flat=True)) == ["full"]


def test_limits_are_set_and_written_down() -> None:
    client = person("limit_queue")
    actions.enqueue(queue="mail")
    page = "/admin/relay_queue/queue/mail/limits/"
    assert client.get(page).status_code == 200
    response = client.post(page, {"capacity": "500", "max_running": ""})
    assert response.status_code == 302
    row = Queue.objects.get(name="mail")
    assert (row.capacity, row.max_running) == (500, None)
    (entry,) = entries()
    assert entry["relay"] == {"act": "limits", "capacity": 500}
    client.post(page, {"capacity": "", "initial-capacity": "500", "max_running": "0"})
    row.refresh_from_db()
    assert (row.capacity, row.max_running) == (None, 0)


def limits_form(client: Client) -> dict[str, str]:
    """Return what the form of the limits sends if nothing is typed."""
    page = client.get("/admin/relay_queue/queue/mail/limits/").content.decode()
    fields = re.findall(r'<input type="(?:number|hidden)" name="([^"]+)"(?: value="(\d*)")?', page)
    return {name: value for name, value in fields if name != "csrfmiddlewaretoken"}


def limits_of(name: str) -> tuple[int | None, int | None]:
    return Queue.objects.values_list("capacity", "max_running").get(name=name)


def test_two_operators_keep_each_others_change_of_the_limits() -> None:
    one, other = person("limit_queue"), person("limit_queue", name="other")
    actions.enqueue(queue="mail")
    page = "/admin/relay_queue/queue/mail/limits/"
    actions.do(store.set_limits, "mail", capacity=10, max_running=2)
    shown = limits_form(one)
    assert shown == {
        "capacity": "10",
        "initial-capacity": "10",
        "max_running": "2",
        "initial-max_running": "2",
    }
    one.post(page, {**shown, "capacity": "20"})
    other.post(page, {**shown, "max_running": "4"})
    assert limits_of("mail") == (20, 4)
    assert [entry["relay"] for entry in entries()] == [
        {"act": "limits", "capacity": 20},
        {"act": "limits", "max_running": 4},
    ]


def test_limit_that_somebody_has_changed_meanwhile_is_not_overwritten_unseen() -> None:
    client = person("limit_queue")
    actions.enqueue(queue="mail")
    page = "/admin/relay_queue/queue/mail/limits/"
    shown = limits_form(client)
    actions.do(store.set_limits, "mail", capacity=10, max_running=2)
    response = client.post(page, {**shown, "capacity": "20"})
    assert response.status_code == 200
    assert "showed no limit, and somebody has set 10 meanwhile" in response.content.decode()
    assert limits_of("mail") == (10, 2)
    client.post(page, response.context["form"].data)
    assert limits_of("mail") == (20, 2), "set once more, knowingly"
    client.post(page, {**shown, "capacity": "20"})
    assert limits_of("mail") == (20, 2), "it is so already"
    assert len(entries()) == 1


@pytest.mark.parametrize("capacity", ["-1", "many", "2147483648"])
def test_limits_out_of_bounds_are_asked_for_again(capacity: str) -> None:
    client = person("limit_queue")
    actions.enqueue(queue="mail")
    page = "/admin/relay_queue/queue/mail/limits/"
    response = client.post(page, {"capacity": capacity, "max_running": ""})
    assert response.status_code == 200
    assert response.context["form"].errors


def test_limits_need_their_permission_and_a_queue() -> None:
    actions.enqueue(queue="mail")
    client = person("pause_queue")
    for method in (client.get, client.post):
        assert method("/admin/relay_queue/queue/mail/limits/").status_code == 403
    page = client.get("/admin/relay_queue/queue/mail/change/").content.decode()
    assert "/limits/" not in page
    client = person("limit_queue", name="other")
    assert client.get("/admin/relay_queue/queue/none/limits/").status_code == 404


@pytest.mark.parametrize("act", QUEUE_ACTIONS + WORKER_ACTIONS, ids=lambda act: act.name)
def test_acts_on_queues_and_workers_need_their_permission(act: Any) -> None:
    actions.enqueue(queue="mail")
    worker_id = actions.register()
    client = person(*{a.permission for a in JOB_ACTIONS})
    row = "queue/mail" if act in QUEUE_ACTIONS else f"worker/{worker_id}"
    assert client.post(f"/admin/relay_queue/{row}/act/{act.name}/", YES).status_code == 403
    assert Queue.objects.get(name="mail").paused_at is None
    assert Worker.objects.get(pk=worker_id).ordered == ""


def test_worker_is_told_to_be_quiet_to_serve_again_and_to_stop() -> None:
    client = person("stop_worker")
    worker_id = actions.register()
    page = f"/admin/relay_queue/worker/{worker_id}"
    told = []
    for act in ("quiet", "serve", "stop"):
        client.post(f"{page}/act/{act}/", YES)
        told.append(Worker.objects.get(pk=worker_id).ordered)
    assert told == ["quiet", "", "stop"]
    assert [entry["relay"]["act"] for entry in entries()] == ["quiet", "serve", "stop"]
    assert client.post(f"{page}/act/stop/").status_code == 200, "it asks"


def test_worker_that_has_ended_meanwhile_is_named() -> None:
    client = person("stop_worker")
    worker_id = actions.register()
    actions.do(store.stop_workers, [worker_id], "stopped")
    page = f"/admin/relay_queue/worker/{worker_id}"
    assert "It has ended" in said(client.post(f"{page}/act/stop/", YES))
    buttons = client.get(f"{page}/change/").context["relay_acts"]
    assert all(str(button.why_not) == "It has ended." for button in buttons)
    assert not LogEntry.objects.exists()


def test_every_act_belongs_to_a_permission_of_its_table() -> None:
    for model, acts in ((Job, JOB_ACTIONS), (Queue, QUEUE_ACTIONS), (Worker, WORKER_ACTIONS)):
        known = {codename for codename, _ in model._meta.permissions}
        assert {act.permission for act in acts} <= known
    assert all(isinstance(act, JobAction) and act.states for act in JOB_ACTIONS)
    assert len({act.permission for act in JOB_ACTIONS}) == len(JOB_ACTIONS)
