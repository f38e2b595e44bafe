"""Verify names each planted fault, and condemns no history that the store wrote itself.

On each engine; what is about SQLite's files is in ``test_verify_sqlite``.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from relay_queue import store
from relay_queue.db.filename import file_of_connection
from relay_queue.db.sqlite3.cursor import is_read_only
from relay_queue.models import Lease
from relay_queue.query import ledger
from relay_queue.query import verify as verification
from relay_queue.query.verify import verify
from relay_queue.query.verify_rules import ADVICE, Fault
from relay_queue.states import State
from tests.store.actions import Wall, atomic, connection, register, rows

pytestmark = pytest.mark.usefixtures("undone")


@pytest.fixture
def undone(engine: str) -> Iterator[None]:
    """Roll everything back at the end, indexes and constraints that a test drops included."""
    with atomic():
        yield
        transaction.set_rollback(True, using=connection().alias)


def enqueue(count: int = 1, **options: object) -> list[int]:
    options.setdefault("task", "tests.tasks.anything")
    with store.transaction() as tx:
        jobs = [store.new_job(args=[n], kwargs={}, **options) for n in range(count)]
        return [enqueued.job_id for enqueued in store.enqueue_many(tx, jobs)]


def claim(limit: int = 1) -> list[store.Claim]:
    with store.transaction() as tx:
        return store.claim(tx, worker_id=None, queues=["default", "other"], limit=limit)


def run(sql: str, *params: object) -> None:
    with connection().cursor() as cursor:
        cursor.execute(sql, params)


DROP_CHECKS = """
    DO $$ DECLARE found record; BEGIN
        FOR found IN SELECT conrelid::regclass AS name, conname FROM pg_constraint
                     WHERE contype = 'c' AND conrelid::regclass::text LIKE 'relay_queue_%' LOOP
            EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', found.name, found.conname);
        END LOOP;
    END $$
"""

UNCHECK = {
    "sqlite": ["PRAGMA ignore_check_constraints = ON", "PRAGMA ignore_check_constraints = OFF"],
    # A table with links that are yet to be checked would not let itself be altered.
    "postgresql": ["SET CONSTRAINTS ALL IMMEDIATE;" + DROP_CHECKS.replace("%", "%%"), "SELECT 1"],
}
"""What lets an engine forget what it was told to check, and what reminds it."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Let rows be written that the constraints of the tables forbid."""
    forget, remember = UNCHECK[connection().vendor]
    run(forget)
    run("DROP INDEX relay_lease_one_open")  # the test's rollback brings it back
    try:
        yield
    finally:
        run(remember)


def faults() -> list[Fault]:
    return verify().faults


def kinds() -> set[str]:
    return {fault.kind for fault in faults()}


def succeeded_job() -> tuple[int, int]:
    """Return the ids of a succeeded job and its lease."""
    (job_id,) = enqueue()
    (leased,) = claim()
    with store.transaction() as tx:
        store.ack(tx, leased.lease_id, leased.token, "null")
    return job_id, leased.lease_id


def test_empty_queue_is_sound() -> None:
    assert verify().ok


def test_nothing_is_written_by_looking() -> None:
    succeeded_job()
    run("UPDATE relay_queue_job SET checksum = 0")
    statements: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        statements.append(sql)
        return execute(sql, *rest)

    with connection().execute_wrapper(note):
        assert not verify(file_of_connection(connection())).ok
        ledger.ledger_totals()
    assert len(statements) > 8
    assert [sql for sql in statements if not is_read_only(sql)] == []


def test_altered_payload_is_named() -> None:
    _, altered = enqueue(2)
    run("UPDATE relay_queue_job SET payload = replace(payload, '1', '7') WHERE id = %s", altered)
    (fault,) = faults()
    assert (fault.kind, fault.job_id) == ("checksum", altered)
    assert "Enqueue its work again" in fault.advice


def test_worker_whose_row_names_no_incarnation_is_named() -> None:
    register()
    assert verify().ok
    run("UPDATE relay_queue_worker SET incarnation = '../../elsewhere'")
    (fault,) = faults()
    assert (fault.kind, "'../../elsewhere'" in fault.message) == ("worker", True)
    assert "Delete the row" in fault.advice


def test_running_job_without_its_lease_is_named() -> None:
    (job_id,) = enqueue()
    claim()
    run("DELETE FROM relay_queue_lease")
    found = {fault.kind: fault for fault in faults()}
    assert found["missing_lease"].job_id == job_id
    assert found["attempt"].job_id == job_id


def test_two_open_leases_are_named() -> None:
    (job_id,) = enqueue()
    (leased,) = claim()
    with unchecked():
        run(
            "INSERT INTO relay_queue_lease (job_id, attempt, token, acquired_at, expires_at, error,"
            " traceback, refused_verb, refused_reason) SELECT job_id, attempt + 1, 'x',"
            " acquired_at, expires_at, '', '', '', '' FROM relay_queue_lease"
        )
        found = {fault.kind: fault for fault in faults()}
    assert found["two_open_leases"].job_id == job_id
    assert found["two_open_leases"].lease_id == leased.lease_id


def test_open_lease_under_a_newer_one_is_named(wall: Wall) -> None:
    (job_id,) = enqueue()
    (leased,) = claim()
    with store.transaction() as tx:
        store.nack(tx, leased.lease_id, leased.token, delay_seconds=0.0)
        store.promote(tx)
    claim()
    newest = rows(Lease).latest("id").id
    with unchecked():
        run("UPDATE relay_queue_lease SET ended_at = NULL, outcome = NULL")
        run(
            "UPDATE relay_queue_lease SET ended_at = expires_at, outcome = 'failed' WHERE id = %s",
            newest,
        )
        found = {fault.kind: fault for fault in faults()}
    assert found["overlapping_leases"].job_id == job_id
    assert found["overlapping_leases"].lease_id == leased.lease_id
    assert str(newest) in found["overlapping_leases"].message


def test_wrong_counter_is_named_with_both_numbers() -> None:
    enqueue(3, queue="other")
    run("UPDATE relay_queue_queuecount SET n = 5 WHERE queue = 'other' AND state = 'ready'")
    (fault,) = faults()
    assert fault.kind == "counter"
    assert fault.message == "queue 'other' counts 5 ready jobs and has 3"


def test_counter_without_jobs_is_named() -> None:
    run("INSERT INTO relay_queue_queuecount (queue, state, shard, n) VALUES ('q', 'dead', 0, 1)")
    assert kinds() == {"counter"}


def test_attempts_beyond_the_budget_are_named() -> None:
    (job_id,) = enqueue(max_attempts=1)
    (leased,) = claim()
    with store.transaction() as tx:
        store.release(tx, leased.lease_id, leased.token)
    with unchecked():
        run("UPDATE relay_queue_job SET attempt = 2")
        found = {fault.kind: fault for fault in faults()}
    assert found["budget"].job_id == job_id
    assert "goes from 0 to 1" in found["budget"].message


def test_terminal_job_with_an_open_lease_is_named() -> None:
    job_id, lease_id = succeeded_job()
    run("UPDATE relay_queue_lease SET ended_at = NULL, outcome = NULL")
    found = {fault.kind: fault for fault in faults()}
    assert (found["stray_lease"].job_id, found["stray_lease"].lease_id) == (job_id, lease_id)


def test_impossible_state_is_named() -> None:
    (job_id,) = enqueue()
    with unchecked():
        run("UPDATE relay_queue_job SET state = 'limbo'")
        found = {fault.kind: fault for fault in faults()}
    assert found["unknown_state"].job_id == job_id
    assert "'limbo'" in found["unknown_state"].message


def test_unknown_outcome_is_named() -> None:
    succeeded_job()
    with unchecked():
        run("UPDATE relay_queue_lease SET outcome = 'shrugged'")
        assert "lease_outcome" in kinds()


def test_ended_lease_without_an_outcome_is_named() -> None:
    succeeded_job()
    with unchecked():
        run("UPDATE relay_queue_lease SET outcome = NULL")
        assert "lease_outcome" in kinds()


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        ("UPDATE relay_queue_job SET finished_at = NULL", "finished_at"),
        ("UPDATE relay_queue_job SET attempt = 2", "attempt"),
        ("UPDATE relay_queue_lease SET attempt = 2", "attempt_order"),
        ("UPDATE relay_queue_lease SET outcome = 'failed'", "last_outcome"),
        ("UPDATE relay_queue_lease SET outcome = 'failed'", "acked"),
        ("UPDATE relay_queue_job SET state = 'dead'", "acked"),
        ("UPDATE relay_queue_lease SET expires_at = '2001-01-01 00:00:00'", "acked_late"),
    ],
)
def test_damage_to_a_succeeded_job_is_named(damage: str, kind: str) -> None:
    job_id, _ = succeeded_job()
    assert verify().ok
    run(damage)
    found = {fault.kind: fault for fault in faults()}
    assert found[kind].job_id == job_id


def test_unfinished_job_with_a_finishing_time_is_named() -> None:
    enqueue()
    run("UPDATE relay_queue_job SET finished_at = created_at")
    assert kinds() == {"finished_at"}


def test_suspect_that_is_sound_at_the_second_look_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enqueue(3)
    looks: list[int] = []

    def suspicious(job: object, leases: object) -> list[Fault]:
        looks.append(job.id)  # type: ignore[attr-defined]
        return [Fault("attempt", "gone at the second look")] if len(looks) <= 3 else []

    monkeypatch.setattr(verification, "check_job", suspicious)
    assert verify().ok
    assert looks[:3] == looks[3:]


def test_large_payloads_are_read_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job_ids = enqueue(20)
    monkeypatch.setattr(verification, "PAYLOAD_CHARS_PER_RANGE", 50)
    run("UPDATE relay_queue_job SET payload = payload || ' '")
    assert [fault.job_id for fault in faults()] == job_ids


def test_kept_faults_are_bounded_and_the_count_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue(20)
    run("UPDATE relay_queue_job SET checksum = 0")
    monkeypatch.setattr(verification, "MOST_FAULTS_KEPT", 5)
    answer = verify(jobs_per_range=3)
    assert (answer.fault_count, len(answer.faults), answer.jobs) == (20, 5, 20)


def test_every_fault_comes_with_advice() -> None:
    assert all(len(text) > 20 for text in ADVICE.values())


# Legal histories: whatever the verbs do, in any order, with any clock, stands up to every rule.


def _act(rng: random.Random, held: list[store.Claim], wall: Wall) -> None:
    """Do one random thing that an application, a worker or an operator may do."""
    jobs = [row[0] for row in _fetch("SELECT id FROM relay_queue_job")]
    some = rng.sample(jobs, min(len(jobs), 3))
    actions: list[Callable[[store.Transaction], object]] = [
        lambda tx: store.cancel(tx, some),
        lambda tx: store.requeue(tx, some),
        lambda tx: store.run_now(tx, some),
        lambda tx: store.release_leases(tx, some[:1]),
        lambda tx: store.discard(tx, some[:1]),
        lambda tx: store.set_priority(tx, some, rng.randint(-5, 5)),
        lambda tx: store.promote(tx),
        lambda tx: store.recover_expired(tx),
        lambda tx: store.recover_dead(tx, [rng.choice([1, 2])]),
        lambda tx: store.renew(tx, [(c.lease_id, c.token, 60.0) for c in held[-3:]]),
        lambda tx: store.prune(tx, rng.choice([State.DEAD, State.SUCCEEDED]), tx.now, 1),
        lambda tx: _alter_one(rng, tx),
        *[lambda tx: _claim_some(rng, tx, held)] * 8,
        *[lambda tx: _settle_one(rng, tx, held)] * 8,
        *[lambda tx: _enqueue_some(rng, tx)] * 3,
    ]
    # Steps back as well: the wall clock may be set.
    wall.advance(rng.choice([0.0, 0.5, 20.0, 90.0, -3600.0]))
    with store.transaction() as tx:
        rng.choice(actions)(tx)


def _fetch(sql: str) -> list[tuple[int]]:
    with connection().cursor() as cursor:
        cursor.execute(sql)
        rows: list[tuple[int]] = cursor.fetchall()
        return rows


def _enqueue_some(rng: random.Random, tx: store.Transaction) -> None:
    run_after = tx.now + timedelta(seconds=30) if rng.random() < 0.3 else None
    store.enqueue_many(
        tx,
        [
            store.new_job(
                task="tests.tasks.anything",
                args=[rng.random()],
                kwargs={},
                queue=rng.choice(["default", "other"]),
                max_attempts=rng.randint(1, 3),
                run_after=run_after,
            )
            for _ in range(3)
        ],
    )


def _claim_some(rng: random.Random, tx: store.Transaction, held: list[store.Claim]) -> None:
    worker_id = rng.choice([1, 2, None])
    held += store.claim(tx, worker_id=worker_id, queues=["default", "other"], limit=2)


def _settle_one(rng: random.Random, tx: store.Transaction, held: list[store.Claim]) -> None:
    if not held:
        return
    # Sometimes it stays in the list: told twice, or late.
    leased = rng.choice(held) if rng.random() < 0.3 else held.pop(rng.randrange(len(held)))
    lease = (leased.lease_id, leased.token)
    rng.choice(
        [
            lambda: store.ack(tx, *lease, "null"),
            lambda: store.nack(tx, *lease, error="builtins.ValueError", delay_seconds=1.0),
            lambda: store.nack(tx, *lease, fatal=True),
            lambda: store.snooze(tx, *lease, 5.0),
            lambda: store.release(tx, *lease),
        ]
    )()


def _alter_one(rng: random.Random, tx: store.Transaction) -> None:
    """Damage a ready job, let the claim find it, and put the row right again for the rules."""
    found = tx.fetch("SELECT id, checksum FROM relay_queue_job WHERE state = 'ready' LIMIT 1")
    for job_id, checksum in found:
        tx.execute("UPDATE relay_queue_job SET checksum = -1 WHERE id = %s", [job_id])
        store.claim(tx, worker_id=1, queues=["default", "other"], limit=1_000)
        tx.execute("UPDATE relay_queue_job SET checksum = %s WHERE id = %s", [checksum, job_id])


@pytest.mark.parametrize("seed", range(6))
def test_legal_history_is_never_condemned(seed: int, wall: Wall) -> None:
    rng = random.Random(seed)
    held: list[store.Claim] = []
    for step in range(240):
        _act(rng, held, wall)
        if step % 10 == 0:
            answer = verify(jobs_per_range=7)
            assert answer.ok, (step, answer.faults)
    seen = {row[0] for row in _fetch("SELECT DISTINCT outcome FROM relay_queue_lease")}
    assert len(seen) > 4, f"the history was too plain to prove anything: {seen}"


def test_lease_of_no_job_is_named() -> None:
    run(
        "INSERT INTO relay_queue_lease (job_id, attempt, token, acquired_at, expires_at, error,"
        " traceback, refused_verb, refused_reason)"
        " VALUES (99999, 1, 'x', '2026-01-01', '2026-01-01', '', '', '', '')"
    )
    assert [fault.kind for fault in faults()] == ["foreign_key"]
    assert [fault.kind for fault in verify(file_of_connection(connection())).faults] == [
        "foreign_key"
    ]


def test_database_without_the_tables_says_so() -> None:
    run("DROP TABLE relay_queue_lease")
    (fault,) = faults()
    assert (fault.kind, fault.message) == ("tables", "there is no table relay_queue_lease")


def test_what_only_a_server_can_check_is_noted(engine: str) -> None:
    notes = verify(file_of_connection(connection())).notes
    assert any("pg_amcheck" in note for note in notes) == (engine == "postgresql")
