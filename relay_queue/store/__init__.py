"""Every write to the tables, as verbs in the order of a job's life.

A verb takes an open `Transaction` first, so that several commit together::

    with store.transaction() as tx:
        store.settle(tx, outcomes)
        claims = store.claim(tx, worker_id=7, queues=["default"], limit=16)

Nothing outside this package writes the tables, and no statement here changes a job or a lease by
its id alone: each names the state, or the token, that it expects.
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
from relay_queue.store.condemn import UNREADABLE, condemn, job_of_lease
from relay_queue.store.enqueue import enqueue, enqueue_many, enqueue_waiting
from relay_queue.store.hold import stand_alone
from relay_queue.store.operate import (
    cancel,
    discard,
    hold_limits,
    pause,
    recount,
    release_leases,
    requeue,
    rerank,
    resume,
    run_now,
    set_limits,
    set_priority,
)
from relay_queue.store.prepare import call, prepare, terms
from relay_queue.store.prune import prune, prune_bulk_acts, prune_minutes, prune_workers
from relay_queue.store.queues import ensure_queue
from relay_queue.store.records import (
    Changed,
    Claim,
    Enqueued,
    NewJob,
    Recovered,
    Settled,
    Settlement,
    Terms,
)
from relay_queue.store.recover import promote, recover_dead, recover_expired
from relay_queue.store.renew import renew
from relay_queue.store.settle import ack, nack, release, settle, snooze
from relay_queue.store.transaction import Transaction, in_transaction, transaction
from relay_queue.store.trial import Step, Trial
from relay_queue.store.workers import (
    NewWorker,
    Totals,
    bucket,
    heartbeat,
    order_workers,
    register_worker,
    roll_up,
    stop_workers,
    write_off_workers,
)

__all__ = [
    "UNREADABLE",
    "Changed",
    "Claim",
    "Enqueued",
    "NewBulkAct",
    "NewJob",
    "NewWorker",
    "Recovered",
    "Settled",
    "Settlement",
    "Step",
    "Terms",
    "Totals",
    "Transaction",
    "Trial",
    "ack",
    "bucket",
    "call",
    "cancel",
    "cancel_bulk",
    "claim",
    "condemn",
    "count_bulk",
    "discard",
    "enqueue",
    "enqueue_many",
    "enqueue_waiting",
    "ensure_queue",
    "finish_bulk",
    "give_bulk_to_job",
    "heartbeat",
    "hold_limits",
    "in_transaction",
    "job_of_lease",
    "nack",
    "order_workers",
    "pause",
    "prepare",
    "promote",
    "prune",
    "prune_bulk_acts",
    "prune_minutes",
    "prune_workers",
    "recount",
    "recover_dead",
    "recover_expired",
    "register_worker",
    "release",
    "release_leases",
    "renew",
    "requeue",
    "rerank",
    "resume",
    "roll_up",
    "run_now",
    "set_limits",
    "set_priority",
    "settle",
    "snooze",
    "stand_alone",
    "start_bulk",
    "stop_workers",
    "take_bulk_turn",
    "terms",
    "transaction",
    "write_off_workers",
]
