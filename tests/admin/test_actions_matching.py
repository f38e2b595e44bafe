"""Acts on everything that matches a filter: counted, held fast, in batches, in the background."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from relay_queue import clock, store
from relay_queue.admin.actions import bulk, jobs, matching
from relay_queue.admin.actions.bulk import destination
from relay_queue.exceptions import ConfigurationError
from relay_queue.models import BulkAct, Job
from relay_queue.store.prune import MOST_LEASES
from relay_queue.testing import run_pending
from tests.admin.acting import entries, job_in, person, said
from tests.store import actions

pytestmark = pytest.mark.django_db

LIST = "/admin/relay_queue/job/"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (jobs, bulk):
        monkeypatch.setattr(module, "BATCH", 3)


def ask(client: Client, act: str, query: str = "") -> Any:
    """Choose an act for all that matches, and return the question."""
    data = {"action": act, "select_across": "1", "_selected_action": "0", "index": "0"}
    response = client.post(LIST + query, data)
    assert response.status_code == 200, said(response)
    return response


def answer(client: Client, question: Any, query: str = "", **more: Any) -> Any:
    """Say yes to a question, as its form does."""
    return client.post(LIST + query, {**dict(question.context["hidden"]), **more})


def dead(count: int, queue: str = "default") -> list[int]:
    job_ids = actions.enqueue_each(count, queue=queue)
    for _ in job_ids:
        actions.nack(actions.claim_one(queue), fatal=True)
    return job_ids


def states(job_ids: list[int]) -> list[str]:
    found = Job.objects.filter(pk__in=job_ids).order_by("pk").values_list("state", flat=True)
    return list(found)


def begin(client: Client, act: str, query: str = "", **more: Any) -> BulkAct:
    """Start a bulk act and return its row."""
    response = answer(client, ask(client, act, query), query, **more)
    assert response.status_code == 302, said(response)
    row = BulkAct.objects.latest("pk")
    assert response["Location"].endswith(f"/bulkact/{row.pk}/change/")
    return row


def test_question_gives_the_number_of_those_that_can_take_the_act() -> None:
    client = person("requeue_job")
    dead(2), job_in("cancelled"), job_in("ready")
    question = ask(client, "requeue")
    assert question.context["count"] == 3
    assert not question.context["background"]
    assert ask(client, "requeue", "?state__exact=dead").context["count"] == 2
    assert ask(client, "requeue", "?state__exact=ready").context["count"] == 0
    assert Job.objects.filter(state="ready").count() == 1, "nothing is done by asking"


def test_question_counts_no_further_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MOST_COUNTED", 2)
    client = person("requeue_job")
    dead(4)
    question = ask(client, "requeue")
    assert (question.context["count"], question.context["beyond"]) == (2, True)
    assert "more than 2 jobs" in question.content.decode()
    assert begin(client, "requeue").matched is None


def test_few_are_done_at_once() -> None:
    client = person("requeue_job")
    job_ids = dead(3)
    response = answer(client, ask(client, "requeue"))
    assert "done for 3 jobs" in said(response)
    assert states(job_ids) == ["ready"] * 3
    row = BulkAct.objects.get()
    assert (row.matched, row.changed, row.skipped, row.job_id) == (3, 3, 0, None)
    assert row.finished_at is not None
    assert len(entries()) == 3


def test_jobs_that_came_after_the_question_are_left_alone() -> None:
    client = person("requeue_job")
    before = dead(5, "mail")
    question = ask(client, "requeue")
    after = dead(2, "mail")
    answer(client, question)
    run_pending("default")
    assert states(after) == ["dead", "dead"]
    assert states(before) == ["ready"] * 5


def test_newest_id_of_an_answer_is_not_taken_on_trust() -> None:
    client = person("requeue_job")
    dead(5)
    for text in ("9" * 30, "-1", "nonsense", "٣"):
        question = ask(client, "requeue")
        answer(client, question, upper_id=text)
        assert BulkAct.objects.latest("pk").upper_id <= Job.objects.latest("pk").pk


def test_many_are_done_by_a_job_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    client = person("cancel_job")
    job_ids = actions.enqueue_each(8, queue="mail")
    other = actions.enqueue(queue="other")
    row = begin(client, "cancel", "?queue=mail")
    assert states(job_ids) == ["ready"] * 8, "not in the request"
    sizes: list[int] = []
    turn = store.take_bulk_turn

    def counting(tx: Any, bulk_id: int, position: int, upto: int) -> bool:
        sizes.append(len([i for i in job_ids if position < i <= upto]))
        return turn(tx, bulk_id, position, upto)

    monkeypatch.setattr(bulk.store, "take_bulk_turn", counting)
    run_pending("default")
    assert sizes == [3, 3, 2]
    assert states([*job_ids, other]) == ["cancelled"] * 8 + ["ready"]
    row.refresh_from_db()
    assert (row.changed, row.skipped, row.matched) == (8, 0, 8)
    assert row.finished_at is not None
    assert [entry["shown"] for entry in entries()] == [
        "Changed progress to begun (cancel).",
        "Changed progress to finished (cancel).",
    ]
    assert entries()[0]["relay"]["filters"] == "queue=mail"
    assert entries()[1]["relay"] == {"act": "cancel", "changed": 8, "skipped": 0}
    actions.assert_counters_exact()


def test_question_that_is_answered_twice_begins_one_act() -> None:
    client = person("prioritise_job")
    actions.enqueue_each(5, queue="mail")
    question = ask(client, "prioritise", "?queue=mail")
    first = answer(client, question, "?queue=mail", priority="9")
    run_pending("default")
    again = answer(client, question, "?queue=mail", priority="9")
    assert again["Location"] == first["Location"]
    assert "had been asked for already" in said(again)
    assert BulkAct.objects.count() == 1
    assert [entry["shown"].split()[3] for entry in entries()] == ["begun", "finished"]


@pytest.mark.parametrize("ticked", [False, True])
def test_few_are_done_once_however_often_the_question_is_answered(ticked: bool) -> None:
    client = person("release_job")
    job_ids = actions.enqueue_each(2)
    actions.claim(2)
    data = {"action": "release", "_selected_action": list(map(str, job_ids)), "index": "0"}
    question = client.post(LIST, data) if ticked else ask(client, "release")
    sent: dict[str, list[Any]] = defaultdict(list)
    for name, value in question.context["hidden"]:
        sent[name].append(value)
    assert "done for 2 jobs" in said(client.post(LIST, sent))
    actions.claim(2)  # they run again before the second click arrives
    assert "had been asked for already" in said(client.post(LIST, sent)).lower()
    assert states(job_ids) == ["running", "running"]
    row = BulkAct.objects.get()
    assert (row.matched, row.changed) == (2, 2)
    shown = client.get(f"/admin/relay_queue/bulkact/{row.pk}/change/").content.decode()
    assert ("ticked: 2" in shown, "Newest job" in shown) == (ticked, not ticked)


def test_few_are_done_once_by_two_answers_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    client = person("requeue_job")
    job_ids = dead(2)
    question = ask(client, "requeue")
    answer(client, question)
    actions.do(store.cancel, job_ids)
    # As it looks to a request that began before the other's commit.
    monkeypatch.setattr(matching, "of_nonce", lambda nonce: None)
    assert "Nothing was changed: This had been asked for already." in said(answer(client, question))
    assert states(job_ids) == ["cancelled", "cancelled"]
    assert BulkAct.objects.count() == 1


def test_what_could_not_be_done_can_be_asked_again() -> None:
    client = person("requeue_job")
    job_ids = dead(2)
    actions.do(lambda tx: store.set_limits(tx, "default", capacity=1))
    question = ask(client, "requeue")
    assert "Nothing was changed" in said(answer(client, question))
    actions.do(lambda tx: store.set_limits(tx, "default", capacity=None))
    assert "done for 2 jobs" in said(answer(client, question))
    assert states(job_ids) == ["ready", "ready"]


def test_two_answers_at_one_moment_begin_one_act(monkeypatch: pytest.MonkeyPatch) -> None:
    client = person("prioritise_job")
    actions.enqueue_each(5, queue="mail")
    question = ask(client, "prioritise")
    first = answer(client, question, priority="9")
    # As it looks to a request that began before the other's commit.
    monkeypatch.setattr(matching, "of_nonce", lambda nonce: None)
    again = answer(client, question, priority="9")
    assert again["Location"] == first["Location"]
    assert BulkAct.objects.count() == 1
    assert Job.objects.filter(task__contains="run_bulk_act").count() == 1


def test_another_answer_another_question_and_another_person_begin_acts_of_their_own() -> None:
    client, other = person("prioritise_job"), person("prioritise_job", name="other")
    actions.enqueue_each(5, queue="mail")
    question = ask(client, "prioritise")
    answer(client, question, priority="9")
    answer(client, question, priority="8")
    answer(other, question, priority="9")
    answer(client, ask(client, "prioritise"), priority="9")
    answer(client, question, priority="9", nonce="")
    assert BulkAct.objects.count() == 5


def test_answer_that_finds_nothing_any_more_says_so() -> None:
    client = person("requeue_job")
    job_ids = dead(2)
    question = ask(client, "requeue")
    actions.do(store.requeue, job_ids)
    assert "no job like that is left" in said(answer(client, question))
    assert states(job_ids) == ["ready"] * 2


def test_dead_letters_of_a_search_are_retried_from_their_own_list() -> None:
    client = person("requeue_job")
    job_ids, others = dead(5, "mail"), dead(2, "other")
    path = "/admin/relay_queue/deadletter/?q=queue:mail"
    data = {"action": "requeue", "select_across": "1", "_selected_action": "0", "index": "0"}
    question = client.post(path, data)
    assert question.context["count"] == 5
    client.post(path, dict(question.context["hidden"]))
    row = BulkAct.objects.get()
    assert (row.listing, row.filters) == ("relay_queue.deadletter", "q=queue%3Amail")
    run_pending("default")
    assert states(job_ids) == ["ready"] * 5
    assert states(others) == ["dead"] * 2


def test_bulk_act_carries_what_was_filled_in() -> None:
    client = person("prioritise_job")
    job_ids = actions.enqueue_each(5, queue="mail")
    begin(client, "prioritise", "?queue=mail", priority="9")
    run_pending("default")
    assert {actions.read(job_id).priority for job_id in job_ids} == {9}


def test_job_that_moves_on_between_two_batches_is_not_touched() -> None:
    client = person("cancel_job")
    actions.enqueue_each(5, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    held = actions.claim_one("mail")
    actions.ack(held)
    run_pending("default")
    assert actions.state(held.job_id) == "succeeded"
    row.refresh_from_db()
    assert row.changed == 4


def test_interrupted_bulk_act_goes_on_where_it_was() -> None:
    client = person("cancel_job")
    job_ids = actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    run = bulk._Run(row)
    run.next_batch()
    row.refresh_from_db()
    assert (row.changed, row.position) == (3, job_ids[2])
    run_pending("default")
    row.refresh_from_db()
    assert (row.changed, row.skipped) == (8, 0)


def test_two_runs_of_one_bulk_act_count_each_job_once() -> None:
    client = person("cancel_job")
    actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    one, other = bulk._Run(row), bulk._Run(row)
    while one.next_batch() and other.next_batch():
        pass
    row.refresh_from_db()
    assert (row.changed, row.skipped) == (8, 0)


def test_batch_that_another_run_has_taken_is_left_to_it() -> None:
    client = person("cancel_job")
    job_ids = actions.enqueue_each(4, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    with store.transaction() as tx:
        assert store.take_bulk_turn(tx, row.pk, 0, job_ids[0])
        assert not store.take_bulk_turn(tx, row.pk, 0, job_ids[2])


def test_long_bulk_act_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TURN_SECONDS", 0.0)
    client = person("cancel_job")
    actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    assert run_pending("default") == 4, "three batches and the end, each in a turn of its own"
    job = actions.read(row.job_id or 0)
    assert (job.state, job.attempt) == ("succeeded", 1)
    row.refresh_from_db()
    assert row.changed == 8


def test_bulk_act_can_be_ended_on_its_page() -> None:
    client = person("cancel_job")
    job_ids = actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    bulk._Run(row).next_batch()
    page = f"/admin/relay_queue/bulkact/{row.pk}"
    response = client.get(f"{page}/end/")
    assert response["Location"] == f"{page}/change/"
    assert client.put(f"{page}/end/").status_code == 405
    assert "What was done stays done" in said(client.post(f"{page}/end/"))
    assert "over already" in said(client.post(f"{page}/end/"))
    run_pending("default")
    assert states(job_ids).count("cancelled") == 3
    assert "data-finished" in client.get(f"{page}/progress/").content.decode()


def test_page_shows_how_far_it_is() -> None:
    client = person("cancel_job")
    actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    page = f"/admin/relay_queue/bulkact/{row.pk}"
    text = client.get(f"{page}/change/").content.decode()
    assert "Waits for a worker that serves the queue default" in text
    assert f"/job/{row.job_id}/change/" in text
    bulk._Run(row).next_batch()
    text = client.get(f"{page}/progress/").content.decode()
    assert '<progress max="8" value="3"' in text
    assert "data-finished" not in text
    run_pending("default")
    assert "Done." in client.get(f"{page}/progress/").content.decode()
    assert client.post(f"{page}/change/").status_code == 405


def test_page_says_when_nobody_goes_on() -> None:
    client = person("cancel_job")
    actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    actions.cancel(row.job_id or 0)
    text = client.get(f"/admin/relay_queue/bulkact/{row.pk}/progress/").content.decode()
    assert "its job is cancelled" in text


def test_others_see_a_bulk_act_only_with_the_permission_and_end_it_with_that_of_the_act() -> None:
    owner = person("cancel_job")
    actions.enqueue_each(8, queue="mail")
    row = begin(owner, "cancel", "?queue=mail")
    page = f"/admin/relay_queue/bulkact/{row.pk}"
    stranger = person(name="stranger")
    for path in ("change", "progress"):
        assert stranger.get(f"{page}/{path}/").status_code == 403
    assert stranger.post(f"{page}/end/").status_code == 403
    viewer = person("view_bulkact", name="viewer")
    text = viewer.get(f"{page}/change/").content.decode()
    assert "End it here" not in text
    assert viewer.post(f"{page}/end/").status_code == 403
    assert viewer.get("/admin/relay_queue/bulkact/").status_code == 200
    assert owner.get("/admin/relay_queue/bulkact/").status_code == 403
    row.refresh_from_db()
    assert row.finished_at is None


def reason(row: BulkAct) -> str:
    run_pending("default")
    row.refresh_from_db()
    assert row.finished_at is not None
    return row.stop_reason


def test_bulk_act_of_somebody_who_may_no_more_is_stopped() -> None:
    client = person("cancel_job")
    job_ids = actions.enqueue_each(8, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    User.objects.get(username="operator").user_permissions.clear()
    assert reason(row) == "operator may not do this any more"
    assert set(states(job_ids)) == {"ready"}


def test_bulk_act_stops_at_a_full_queue_and_says_so() -> None:
    client = person("requeue_job")
    dead(8, "small")
    actions.do(store.set_limits, "small", capacity=4, max_running=None)
    row = begin(client, "requeue", "?queue=small")
    assert "queue 'small' is full" in reason(row)
    assert row.changed == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"act": "nonsense"}, "there is no act 'nonsense'"),
        ({"listing": "relay_queue.nonsense"}, "no list 'relay_queue.nonsense'"),
        ({"filters": "state__nonsense=1"}, "refuses the filter"),
        ({"time_zone": "Mars/Olympus"}, "no time zone 'Mars/Olympus'"),
    ],
)
def test_bulk_act_that_makes_no_sense_any_more_is_stopped(
    change: dict[str, str], expected: str
) -> None:
    client = person("cancel_job")
    actions.enqueue_each(4, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    BulkAct.objects.filter(pk=row.pk).update(**change)
    assert expected in reason(row)


def test_dates_of_the_filter_are_read_in_the_zone_of_who_typed_them(settings: Any) -> None:
    settings.TIME_ZONE = "Pacific/Kiritimati"
    client = person("cancel_job")
    actions.enqueue_each(4, queue="mail")
    row = begin(client, "cancel", "?queue=mail")
    assert row.time_zone == "Pacific/Kiritimati"
    settings.TIME_ZONE = "UTC"
    with matching.as_asked(row):
        assert matching.zone_and_language()[0] == "Pacific/Kiritimati"


def test_page_parameters_are_no_filters() -> None:
    client = person("cancel_job")
    actions.enqueue_each(4, queue="mail")
    row = begin(client, "cancel", "?queue=mail&p=1&at=1~5~5")
    assert row.filters == "queue=mail"


def test_act_that_could_not_be_enqueued_leaves_nothing_behind(settings: Any) -> None:
    client = person("cancel_job")
    actions.enqueue_each(4, queue="mail")
    question = ask(client, "cancel", "?queue=mail")
    settings.RELAY = {"ACTS_BACKEND": "nobody"}
    assert "is 'nobody', which is no alias" in said(answer(client, question, "?queue=mail"))
    assert not BulkAct.objects.exists()


@pytest.mark.parametrize(
    ("tasks", "relay", "expected"),
    [
        ({"QUEUES": []}, {}, ("default", "default")),
        ({"QUEUES": ["a", "b"]}, {}, ("default", "a")),
        ({"QUEUES": ["a", "default"]}, {}, ("default", "default")),
        ({"QUEUES": []}, {"QUEUES": ["z", "y"]}, ("default", "z")),
        ({"QUEUES": []}, {"ACTS_QUEUE": "acts"}, ("default", "acts")),
        ({}, {"ACTS_BACKEND": "default"}, ("default", "default")),
    ],
)
def test_bulk_acts_go_to_the_configured_alias_and_queue(
    settings: Any, tasks: dict[str, Any], relay: dict[str, Any], expected: tuple[str, str]
) -> None:
    settings.TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", **tasks}}
    settings.RELAY = relay
    assert destination() == expected


@pytest.mark.parametrize(
    ("tasks", "relay", "message"),
    [
        ({}, {}, "No alias of TASKS is backed by Relay"),
        ({"default": {"QUEUES": ["a"]}}, {"ACTS_QUEUE": "b"}, "does not admit"),
    ],
)
def test_destination_that_cannot_be_is_refused(
    settings: Any, tasks: dict[str, Any], relay: dict[str, Any], message: str
) -> None:
    backend = {"BACKEND": "relay_queue.backend.RelayBackend"}
    settings.TASKS = {alias: {**backend, **params} for alias, params in tasks.items()}
    settings.RELAY = relay
    with pytest.raises(ConfigurationError, match=message):
        destination()


def test_list_of_bulk_acts_says_how_each_stands() -> None:
    person("cancel_job")
    client = person("view_bulkact", "view_payload", name="viewer")
    for n, (filters, change) in enumerate(
        {
            "state__exact=ready&queue=mail": {},
            "q=error%3Atimeout": {"position": 5},
            "": {"finished_at": clock.now(), "changed": 1_234},
            "task=a": {"finished_at": clock.now(), "stop_reason": "no room"},
            "task=b": {"finished_at": clock.now(), "cancelled_at": clock.now()},
        }.items()
    ):
        new = store.NewBulkAct(
            str(n),
            "cancel",
            None,
            "relay_queue.job",
            filters,
            "UTC",
            "en",
            9,
            None,
            "1",
            "ada",
            "admin",
        )
        bulk_id = actions.do(store.start_bulk, new)
        BulkAct.objects.filter(pk=bulk_id).update(**change)
    page = client.get("/admin/relay_queue/bulkact/").content.decode()
    rows = [re.sub(r"<[^>]*>", " ", row) for row in page.partition("<tbody>")[2].split("<tr>")[1:]]
    told = [" ".join(html.unescape(row).split()) for row in reversed(rows)]
    for beginning, row in zip(
        (
            "Cancel Waits state: ready, queue: mail ada found > 100,000 changed 0",
            "Cancel At work q: error:timeout ada",
            "Cancel Done every job ada found > 100,000 changed 1,234 had moved on 0",
            "Cancel Stopped no room task: a ada",
            "Cancel Ended by hand task: b ada",
        ),
        told,
        strict=True,
    ):
        assert row.startswith(beginning)


def test_few_with_long_ledgers_are_discarded_at_once_in_bounded_transactions() -> None:
    client = person("discard_job")
    job_ids = dead(3)
    actions.add_leases(job_ids[1], 3 * MOST_LEASES)
    response = answer(client, ask(client, "discard"))
    assert "done for 3 jobs" in said(response)
    assert states(job_ids) == []
    row = BulkAct.objects.get()
    assert (row.changed, row.skipped, row.finished_at is None) == (3, 0, False)
    assert sorted(int(entry["key"]) for entry in entries()) == job_ids
    actions.assert_counters_exact()


def test_many_with_long_ledgers_are_discarded_by_a_job_that_counts_each_once() -> None:
    client = person("discard_job")
    job_ids = dead(8, "mail")
    for job_id in (job_ids[0], job_ids[4], job_ids[7]):
        actions.add_leases(job_id, 2 * MOST_LEASES)
    row = begin(client, "discard", "?queue=mail")
    run_pending("default")
    assert states(job_ids) == []
    row.refresh_from_db()
    assert (row.changed, row.skipped) == (8, 0)
    assert row.finished_at is not None
    actions.assert_counters_exact()


def test_one_with_a_long_ledger_is_discarded_from_its_page() -> None:
    client = person("discard_job")
    (job_id,) = dead(1)
    actions.add_leases(job_id, 2 * MOST_LEASES)
    response = client.post(f"/admin/relay_queue/job/{job_id}/act/discard/", {"confirmed": "yes"})
    assert response.status_code == 302
    assert states([job_id]) == []
    assert len(entries()) == 1
