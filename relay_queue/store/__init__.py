"""Every write to the tables, as verbs in the order of a job's life.

A verb takes an open `Transaction` first, so that several commit together::

    with store.transaction() as tx:
        store.settle(tx, outcomes)
        claims = store.claim(tx, worker_id=7, queues=["default"], limit=16)

Nothing outside this package writes the tables, and no statement here changes a job or a lease by
its id alone: each names the state, or the token, that it expects. Reading is `relay_queue.query`.

A queue
    ensure_queue        Create the row of a queue if there is none.
    hold_limits         Read the limits of a queue, and keep others from changing them.
    set_limits          Replace its capacity or the number of its jobs that may run.
    rerank              Change its aging, and rewrite the ranks of its unfinished jobs.
    pause               Stop claims from it; what runs goes on.
    resume              Allow claims from it again.
    recount             Set its counters to what its jobs are.
    delete_queue        Delete it, if it has no job.

A job comes
    job_options         Check what all calls of one task have in common.
    build_job           Check the arguments of one call, and sign them.
    new_job             Both at once, for one job.
    enqueue             Insert one job, or return the job that holds its key.
    enqueue_many        Insert many with a few statements, all or none.
    enqueue_waiting     Insert one, waiting for room in its queue.

It runs
    claim               Take ready jobs in their order, and grant a lease on each.
    renew               Extend leases, for their owners alone.
    settle              Apply settlements of owners, or refuse and record them.
    ack                 One function returned: its job has succeeded.
    nack                One function failed: its job backs off, or is dead.
    snooze              One function asks to be run again later, uncharged.
    release             One owner hands its job back, uncharged.

Its owner is gone
    recover_expired     End the leases whose time is over, and send their jobs on.
    recover_dead        End the leases of workers that are proven dead.
    promote             Make waiting jobs ready that are due.
    mark_unreadable     Make a job dead whose row is proven to be at fault.

An operator acts
    cancel              End unfinished jobs for good, running ones included.
    requeue             Put dead and cancelled jobs back to ready, with a fresh budget.
    run_now             Make waiting jobs ready before their time.
    set_priority        Change the priority of jobs that wait.
    release_leases      Take running jobs from their owners, uncharged.
    discard             Delete dead letters with their ledger.
    start_bulk, give_bulk_to_job, take_bulk_turn, count_bulk, cancel_bulk, finish_bulk
                        One act on many jobs, in batches that keep their position.
    lock_lease_table    Keep all other transactions from leases until the commit.

A schedule
    sync_schedules      Make the schedules of a project what its code declares.
    fire_schedules      Enqueue the jobs of slots that have come, each slot once.
    pause_schedule      Let one stand still; its slots meanwhile are no backlog.
    resume_schedule     Let it go on from now.
    run_schedule        Enqueue its job now, beside its slots.

A worker
    register_worker     Add a worker, whose lock is held already.
    register_again      Add a living worker whose row was deleted.
    heartbeat           Say that it is alive, and write its totals.
    roll_up             Write its statistics of some minutes.
    order_workers       Tell workers to be quiet, to stop, or to serve again.
    stop_workers        Mark workers as ended, with the reason.
    write_off_workers   Mark workers as ended that have been silent for long.

The end
    prune               Delete old finished jobs with their ledger.
    prune_minutes, prune_workers, prune_bulk_acts, prune_runs
                        Delete old statistics, workers, bulk acts and runs of schedules.
"""

from relay_queue.store.bulk import (
    NewBulkAct,
    cancel_bulk,
    count_bulk,
    finish_bulk,
    give_bulk_to_job,
    start_bulk,
    take_bulk_turn,
)
from relay_queue.store.claim import claim
from relay_queue.store.enqueue import (
    build_job,
    enqueue,
    enqueue_many,
    enqueue_waiting,
    job_options,
    new_job,
)
from relay_queue.store.operate import (
    cancel,
    discard,
    lock_lease_table,
    release_leases,
    requeue,
    run_now,
    set_priority,
)
from relay_queue.store.prune import (
    prune,
    prune_bulk_acts,
    prune_minutes,
    prune_runs,
    prune_workers,
)
from relay_queue.store.queues import (
    delete_queue,
    ensure_queue,
    hold_limits,
    pause,
    recount,
    rerank,
    resume,
    set_limits,
)
from relay_queue.store.records import (
    Changed,
    Claim,
    Enqueued,
    JobOptions,
    NewJob,
    Recovered,
    Settled,
    Settlement,
)
from relay_queue.store.recover import promote, recover_dead, recover_expired
from relay_queue.store.schedules import (
    Declared,
    Synced,
    fire_schedules,
    pause_schedule,
    resume_schedule,
    run_schedule,
    sync_schedules,
)
from relay_queue.store.settle import ack, nack, release, renew, settle, snooze
from relay_queue.store.transaction import Transaction, in_transaction, transaction
from relay_queue.store.trial import UNREADABLE, Trial, TrialStep, job_of_lease, mark_unreadable
from relay_queue.store.workers import (
    NewWorker,
    Totals,
    bucket,
    heartbeat,
    order_workers,
    register_again,
    register_worker,
    roll_up,
    stop_workers,
    write_off_workers,
)

__all__ = [
    "UNREADABLE",
    "Changed",
    "Claim",
    "Declared",
    "Enqueued",
    "JobOptions",
    "NewBulkAct",
    "NewJob",
    "NewWorker",
    "Recovered",
    "Settled",
    "Settlement",
    "Synced",
    "Totals",
    "Transaction",
    "Trial",
    "TrialStep",
    "ack",
    "bucket",
    "build_job",
    "cancel",
    "cancel_bulk",
    "claim",
    "count_bulk",
    "delete_queue",
    "discard",
    "enqueue",
    "enqueue_many",
    "enqueue_waiting",
    "ensure_queue",
    "finish_bulk",
    "fire_schedules",
    "give_bulk_to_job",
    "heartbeat",
    "hold_limits",
    "in_transaction",
    "job_of_lease",
    "job_options",
    "lock_lease_table",
    "mark_unreadable",
    "nack",
    "new_job",
    "order_workers",
    "pause",
    "pause_schedule",
    "promote",
    "prune",
    "prune_bulk_acts",
    "prune_minutes",
    "prune_runs",
    "prune_workers",
    "recount",
    "recover_dead",
    "recover_expired",
    "register_again",
    "register_worker",
    "release",
    "release_leases",
    "renew",
    "requeue",
    "rerank",
    "resume",
    "resume_schedule",
    "roll_up",
    "run_now",
    "run_schedule",
    "set_limits",
    "set_priority",
    "settle",
    "snooze",
    "start_bulk",
    "stop_workers",
    "sync_schedules",
    "take_bulk_turn",
    "transaction",
    "write_off_workers",
]
