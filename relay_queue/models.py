"""The tables of the queue: fields, indexes and constraints. Only `relay_queue.store` writes them.

Times are aware UTC. Durations are seconds. JSON is kept as text, so that its bytes are the same on
every database and the checksum over them holds.
"""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from relay_queue.db.oneof import OneOf
from relay_queue.states import (
    INTERRUPTED,
    NOT_ACKED,
    Missed,
    Outcome,
    Overlap,
    RunOutcome,
    State,
    WorkerOrder,
)


class Queue(models.Model):
    """A named stream of jobs, and the limits an operator has set on it."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    capacity = models.PositiveIntegerField(
        _("capacity"), null=True, blank=True, help_text=_("Unfinished jobs; empty is unbounded.")
    )
    max_running = models.PositiveIntegerField(
        _("max running"), null=True, blank=True, help_text=_("Open leases; empty is unbounded.")
    )
    aging_seconds = models.FloatField(
        _("aging"),
        null=True,
        blank=True,
        default=60.0,
        help_text=_("Seconds of waiting worth one priority class; empty is strict priority."),
    )
    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        ordering = ["name"]
        # Rows are written by the store alone: there is nothing to add, change or delete by hand.
        default_permissions = ("view",)
        permissions = [
            ("pause_queue", "Can pause and resume queue"),
            ("limit_queue", "Can set the limits of queue"),
            ("delete_queue", "Can delete queue that has no job"),
        ]

    def __str__(self) -> str:
        return self.name


class QueueCount(models.Model):
    """How many jobs of a queue are in a state, exact in the transaction that moved them."""

    queue = models.CharField(_("queue"), max_length=100)
    state = models.CharField(_("state"), max_length=9, choices=State.choices)
    shard = models.PositiveSmallIntegerField(_("shard"), default=0)
    n = models.BigIntegerField(_("jobs"), default=0)

    class Meta:
        verbose_name = _("queue count")
        verbose_name_plural = _("queue counts")
        constraints = [
            models.UniqueConstraint(fields=["queue", "state", "shard"], name="relay_count_key"),
        ]

    def __str__(self) -> str:
        return f"{self.queue} {self.state}: {self.n}"


class Job(models.Model):
    """One enqueued call of a task."""

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(_("queue"), max_length=100)
    backend = models.CharField(_("backend"), max_length=100)
    task = models.CharField(_("task"), max_length=255)
    payload = models.TextField(_("payload"))
    checksum = models.BigIntegerField(_("checksum"))
    idempotency_key = models.CharField(_("idempotency key"), max_length=255, null=True, blank=True)
    priority = models.SmallIntegerField(_("priority"), default=0)
    rank = models.BigIntegerField(_("rank"))
    state = models.CharField(_("state"), max_length=9, choices=State.choices)
    attempt = models.PositiveIntegerField(_("attempt"), default=0)
    attempt_base = models.PositiveIntegerField(_("attempt base"), default=0)
    max_attempts = models.PositiveIntegerField(_("max attempts"))
    losses = models.PositiveIntegerField(_("losses in a row"), default=0)
    lease_seconds = models.FloatField(_("lease"))
    timeout_seconds = models.FloatField(_("timeout"), null=True, blank=True)
    backoff_base_seconds = models.FloatField(_("back-off base"))
    backoff_max_seconds = models.FloatField(_("back-off limit"))
    backoff_jitter = models.CharField(_("back-off jitter"), max_length=4)
    available_at = models.DateTimeField(_("available at"))
    # What the call asked for. ``available_at`` begins there, and each retry moves it.
    run_after = models.DateTimeField(_("run after"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"))
    started_at = models.DateTimeField(_("first started at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    result = models.TextField(_("result"), null=True, blank=True)
    last_error = models.CharField(_("last error"), max_length=500, default="", blank=True)

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ("view",)
        permissions = [
            ("view_dashboard", "Can view the dashboard of the queues"),
            ("view_payload", "Can view arguments and result of job"),
            ("retry_job", "Can retry job now"),
            ("requeue_job", "Can retry job with fresh attempts"),
            ("run_job", "Can run scheduled job now"),
            ("cancel_job", "Can cancel job"),
            ("discard_job", "Can discard dead job"),
            ("release_job", "Can release the lease of job"),
            ("prioritise_job", "Can change the priority of job"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["queue", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="relay_job_key",
            ),
            models.CheckConstraint(
                condition=OneOf("state", values=" ".join(State)), name="relay_job_state_known"
            ),
            models.CheckConstraint(
                condition=Q(attempt__gte=F("attempt_base"))
                & Q(attempt__lte=F("attempt_base") + F("max_attempts")),
                name="relay_job_budget_kept",
            ),
        ]
        # Partial, each on one part of a job's life. A job that moves on leaves the index, so a
        # million finished or future jobs cost a claim nothing.
        indexes = [
            models.Index(
                fields=["queue", "rank", "id"],
                condition=Q(state=State.READY),
                name="relay_job_ready",
            ),
            # The state comes last, so that a few retries are found among many future jobs.
            models.Index(
                fields=["available_at", "state"],
                condition=Q(state__in=[State.SCHEDULED, State.RETRYING]),
                name="relay_job_due",
            ),
            models.Index(
                fields=["state", "finished_at"],
                condition=Q(finished_at__isnull=False),
                name="relay_job_finished",
            ),
            # The only one that holds every job, in the whole order of a list; none of it changes.
            models.Index(fields=["queue", "task", "created_at", "id"], name="relay_job_listing"),
            # For the search: jobs with an error are few, and the text is read from the index.
            models.Index(
                fields=["id", "last_error"], condition=Q(last_error__gt=""), name="relay_job_error"
            ),
        ]

    def __str__(self) -> str:
        return f"job {self.pk} {self.task}"


class Dashboard(Job):
    """The state of all queues: a place in the admin, without rows or a table of its own."""

    class Meta:
        proxy = True
        # The admin sorts its pages by this name: the space, which no browser shows, comes first.
        verbose_name = verbose_name_plural = format_lazy(" {}", _("Dashboard"))
        default_permissions = ()


class DeadLetter(Job):
    """A job that went dead, for the page of its own. Users who may view jobs may view it."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")


class Retry(Job):
    """A job that waits for its next attempt, for the page of its own, as above."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("retry")
        verbose_name_plural = _("retries")


class Worker(models.Model):
    """A worker process, from its start until its row is pruned."""

    id = models.BigAutoField(primary_key=True)
    incarnation = models.CharField(_("incarnation"), max_length=32, unique=True)
    name = models.CharField(_("name"), max_length=100)
    host = models.CharField(_("host"), max_length=255)
    boot_id = models.CharField(_("boot id"), max_length=64, default="", blank=True)
    pid = models.PositiveIntegerField(_("pid"))
    lock_device = models.BigIntegerField(_("lock device"), null=True, blank=True)
    lock_inode = models.BigIntegerField(_("lock inode"), null=True, blank=True)
    session_lock = models.BooleanField(_("session lock"), default=False)
    version = models.CharField(_("version"), max_length=32, default="", blank=True)
    queues = models.TextField(_("queues"), default="", blank=True)
    concurrency = models.PositiveIntegerField(_("concurrency"))
    started_at = models.DateTimeField(_("started at"))
    heartbeat_at = models.DateTimeField(_("heartbeat at"))
    stopped_at = models.DateTimeField(_("stopped at"), null=True, blank=True)
    stop_reason = models.CharField(_("stop reason"), max_length=200, default="", blank=True)
    ordered = models.CharField(
        _("ordered"), max_length=5, choices=WorkerOrder.choices, default="", blank=True
    )
    ordered_at = models.DateTimeField(_("ordered at"), null=True, blank=True)
    claimed = models.BigIntegerField(_("claimed"), default=0)
    succeeded = models.BigIntegerField(_("succeeded"), default=0)
    failed = models.BigIntegerField(_("failed"), default=0)
    refused = models.BigIntegerField(_("refused"), default=0)

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)
        permissions = [("stop_worker", "Can quiet and stop worker")]
        indexes = [
            models.Index(
                fields=["heartbeat_at"], condition=Q(stopped_at=None), name="relay_worker_alive"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.host}, pid {self.pid})"


class Lease(models.Model):
    """The right to run a job for a limited time, kept afterwards as the record of the attempt.

    ``id`` is the epoch: a later lease has a larger one. ``token`` is the fence: a settlement
    without it changes nothing.
    """

    id = models.BigAutoField(primary_key=True)
    job = models.ForeignKey(
        Job, models.DO_NOTHING, related_name="leases", db_index=False, verbose_name=_("job")
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    token = models.CharField(_("token"), max_length=32)
    worker = models.ForeignKey(
        Worker,
        models.DO_NOTHING,
        related_name="leases",
        null=True,
        blank=True,
        db_constraint=False,  # a pruned worker must not take the ledger with it
        db_index=False,
        verbose_name=_("worker"),
    )
    acquired_at = models.DateTimeField(_("acquired at"))
    expires_at = models.DateTimeField(_("expires at"))
    renewed_at = models.DateTimeField(_("renewed at"), null=True, blank=True)
    ended_at = models.DateTimeField(_("ended at"), null=True, blank=True)
    outcome = models.CharField(
        _("outcome"), max_length=9, choices=Outcome.choices, null=True, blank=True
    )
    error = models.CharField(_("error"), max_length=255, default="", blank=True)
    traceback = models.TextField(_("traceback"), default="", blank=True)
    refused_at = models.DateTimeField(_("refused at"), null=True, blank=True)
    refused_verb = models.CharField(_("refused verb"), max_length=10, default="", blank=True)
    refused_reason = models.CharField(_("refused reason"), max_length=200, default="", blank=True)

    class Meta:
        verbose_name = _("lease")
        verbose_name_plural = _("leases")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(
                fields=["job"], condition=Q(ended_at__isnull=True), name="relay_lease_one_open"
            ),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, outcome__isnull=True)
                | Q(ended_at__isnull=False, outcome__isnull=False),
                name="relay_lease_ended_has_outcome",
            ),
        ]
        # Open leases are few, so the expiry index serves for all questions about them: each index
        # more is two writes more for every job.
        indexes = [
            models.Index(fields=["job", "id"], name="relay_lease_job"),
            models.Index(
                fields=["expires_at"], condition=Q(ended_at__isnull=True), name="relay_lease_expiry"
            ),
            models.Index(
                fields=["refused_at"],
                condition=Q(refused_at__isnull=False),
                name="relay_lease_refused",
            ),
            # Tells every verdict but for the jobs that have just succeeded: an ack never enters it.
            models.Index(
                fields=["job", "outcome", "refused_verb"],
                condition=Q(outcome__in=NOT_ACKED),
                name="relay_lease_not_acked",
            ),
            # Attempts of unknown effect; there are few.
            models.Index(
                fields=["ended_at"],
                condition=Q(outcome__in=INTERRUPTED),
                name="relay_lease_interrupted",
            ),
        ]

    def __str__(self) -> str:
        return f"lease {self.pk} of job {self.job_id}"


class QueueMinute(models.Model):
    """What one worker did for one queue in one minute; dashboards sum these."""

    queue = models.CharField(_("queue"), max_length=100)
    worker_id = models.BigIntegerField(_("worker"), default=0)
    minute = models.DateTimeField(_("minute"))
    claimed = models.PositiveIntegerField(_("claimed"), default=0)
    succeeded = models.PositiveIntegerField(_("succeeded"), default=0)
    failed = models.PositiveIntegerField(_("failed"), default=0)
    retried = models.PositiveIntegerField(_("retried"), default=0)
    died = models.PositiveIntegerField(_("died"), default=0)
    expired = models.PositiveIntegerField(_("expired"), default=0)
    refused = models.PositiveIntegerField(_("refused"), default=0)
    # Counts per power-of-two bucket of microseconds, as JSON text {"bucket": count}.
    wait_histogram = models.TextField(_("wait histogram"), default="{}")
    run_histogram = models.TextField(_("run histogram"), default="{}")

    class Meta:
        verbose_name = _("queue minute")
        verbose_name_plural = _("queue minutes")
        constraints = [
            models.UniqueConstraint(
                fields=["minute", "queue", "worker_id"], name="relay_minute_key"
            ),
        ]
        # A day is added up from the index alone: the rows with their histograms are long.
        indexes = [
            models.Index(
                fields=["minute", "succeeded", "failed", "retried", "died"],
                name="relay_minute_sums",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.queue} {self.minute:%Y-%m-%d %H:%M}"


class BulkAct(models.Model):
    """One act on every job that matched a filter, done in batches by a worker.

    ``position`` is the id of the last job that was handled: the next run of the act goes on after
    it. Jobs above ``upper_id`` came later and are left alone.
    """

    id = models.BigAutoField(primary_key=True)
    nonce = models.CharField(_("nonce"), max_length=32, unique=True)
    act = models.CharField(_("act"), max_length=20)
    priority = models.SmallIntegerField(_("priority"), null=True, blank=True)
    listing = models.CharField(_("list"), max_length=100)
    filters = models.TextField(_("filters"), default="", blank=True)
    # Dates in filters are read in the zone and the format of the user who typed them.
    time_zone = models.CharField(_("time zone"), max_length=64)
    language = models.CharField(_("language"), max_length=16)
    upper_id = models.BigIntegerField(_("newest job"))
    matched = models.BigIntegerField(_("matched"), null=True, blank=True)
    position = models.BigIntegerField(_("position"), default=0)
    changed = models.BigIntegerField(_("changed"), default=0)
    skipped = models.BigIntegerField(_("skipped"), default=0)
    # As text and without a constraint: people may live in another database.
    user_id = models.CharField(_("user id"), max_length=64)
    username = models.CharField(_("user"), max_length=255)
    # Each admin site may show other jobs to the same person.
    site = models.CharField(_("admin site"), max_length=255)
    job_id = models.BigIntegerField(_("job"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"))
    cancelled_at = models.DateTimeField(_("cancelled at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    stop_reason = models.CharField(_("stop reason"), max_length=500, default="", blank=True)

    class Meta:
        verbose_name = _("bulk act")
        verbose_name_plural = _("bulk acts")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"bulk act {self.pk}: {self.act}"


class Schedule(models.Model):
    """A call of a task that is enqueued again and again: what, when, and how missed slots are met.

    The row holds all that a job needs, so that any worker may fire it, without the task's code.
    ``next_at`` is empty while it stands still: paused, retired, at fault, or past its end.
    """

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(_("name"), max_length=100, unique=True)
    source = models.CharField(_("source"), max_length=100)
    queue = models.CharField(_("queue"), max_length=100)
    backend = models.CharField(_("backend"), max_length=100)
    task = models.CharField(_("task"), max_length=255)
    payload = models.TextField(_("payload"))
    priority = models.SmallIntegerField(_("priority"))
    max_attempts = models.PositiveIntegerField(_("max attempts"))
    lease_seconds = models.FloatField(_("lease"))
    timeout_seconds = models.FloatField(_("timeout"), null=True, blank=True)
    backoff_base_seconds = models.FloatField(_("back-off base"))
    backoff_max_seconds = models.FloatField(_("back-off limit"))
    backoff_jitter = models.CharField(_("back-off jitter"), max_length=4)
    cron = models.CharField(_("cron expression"), max_length=100, default="", blank=True)
    zone = models.CharField(_("time zone"), max_length=64, default="", blank=True)
    every_seconds = models.FloatField(_("interval"), null=True, blank=True)
    jitter_seconds = models.FloatField(_("jitter"), default=0)
    missed = models.CharField(_("missed"), max_length=4, choices=Missed.choices)
    missed_window_seconds = models.FloatField(_("missed window"))
    overlap = models.CharField(_("overlap"), max_length=6, choices=Overlap.choices)
    start_at = models.DateTimeField(_("start at"), null=True, blank=True)
    end_at = models.DateTimeField(_("end at"), null=True, blank=True)
    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True)
    fault = models.CharField(_("fault"), max_length=500, default="", blank=True)
    next_at = models.DateTimeField(_("next run"), null=True, blank=True)
    last_slot_at = models.DateTimeField(_("last slot"), null=True, blank=True)
    last_job_id = models.BigIntegerField(_("last job"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        default_permissions = ("view",)
        indexes = [
            models.Index(
                fields=["next_at"], condition=Q(next_at__isnull=False), name="relay_schedule_next"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class ScheduleRun(models.Model):
    """What became of one slot of a schedule; of ``n`` slots, if they were missed together."""

    id = models.BigAutoField(primary_key=True)
    schedule_id = models.BigIntegerField(_("schedule"))
    slot_at = models.DateTimeField(_("slot"))
    manual = models.BooleanField(_("by hand"), default=False)
    outcome = models.CharField(_("outcome"), max_length=8, choices=RunOutcome.choices)
    n = models.PositiveIntegerField(_("slots"), default=1)
    reason = models.CharField(_("reason"), max_length=500, default="", blank=True)
    job_id = models.BigIntegerField(_("job"), null=True, blank=True)
    fired_at = models.DateTimeField(_("fired at"))

    class Meta:
        verbose_name = _("run of a schedule")
        verbose_name_plural = _("runs of schedules")
        default_permissions = ("view",)
        constraints = [
            # Fired once, whatever a restored backup, a clock or a hand has done to the schedule.
            models.UniqueConstraint(
                fields=["schedule_id", "slot_at", "manual"], name="relay_run_slot"
            ),
        ]
        indexes = [models.Index(fields=["fired_at"], name="relay_run_fired")]

    def __str__(self) -> str:
        return f"slot {self.slot_at:%Y-%m-%d %H:%M:%S} of schedule {self.schedule_id}"
