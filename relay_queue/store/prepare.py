"""Prepare: check a job against every limit before anything is written. Touches no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from relay_queue import conf
from relay_queue import payload as payload_codec
from relay_queue.backoff import MAX_DELAY_SECONDS, Backoff, Jitter
from relay_queue.exceptions import InvalidJob
from relay_queue.ranking import MAX_PRIORITY, MIN_PRIORITY
from relay_queue.store import bounds
from relay_queue.store.queues import queue_name
from relay_queue.store.records import NewJob, Terms


def terms(
    *,
    task: str,
    queue: str = "default",
    backend: str = "default",
    priority: int = 0,
    run_after: datetime | None = None,
    max_attempts: int | None = None,
    lease_seconds: float | None = None,
    timeout_seconds: float | None = None,
    backoff: Backoff | None = None,
) -> Terms:
    """Return the checked terms of a task's jobs; None stands for the project's default.

    Raises `InvalidJob`, or its child `UnknownQueue`.
    """
    settings = conf.get()
    if backoff is not None and not isinstance(backoff, Backoff):
        raise InvalidJob(f"backoff must be a Backoff, not {type(backoff).__name__}")
    return Terms(
        queue=queue_name(queue),
        backend=bounds.text("backend", backend, 100),
        task=bounds.text("task", task, 255),
        priority=bounds.whole("priority", priority, MIN_PRIORITY, MAX_PRIORITY),
        run_after=None
        if run_after is None
        else bounds.run_after(run_after, settings.max_defer_seconds),
        max_attempts=settings.max_attempts
        if max_attempts is None
        else bounds.whole("max_attempts", max_attempts, 1, settings.max_attempts_limit),
        lease_seconds=_lease_seconds(lease_seconds, settings),
        timeout_seconds=settings.timeout_seconds
        if timeout_seconds is None
        else bounds.seconds("timeout_seconds", timeout_seconds, 0.001, MAX_DELAY_SECONDS),
        backoff=backoff or _default_backoff(settings),
    )


def call(
    agreed: Terms,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> NewJob:
    """Return a job that calls a task on agreed terms. Raises `PayloadError` or `InvalidJob`."""
    settings = conf.get()
    kwargs = {} if kwargs is None else kwargs
    bounds.call(args, kwargs)
    text = payload_codec.encode(
        args, kwargs, max_bytes=settings.max_payload_bytes, max_depth=settings.max_payload_depth
    )
    if idempotency_key is not None:
        idempotency_key = bounds.text("idempotency_key", idempotency_key, 255)
    signed = payload_codec.checksum(
        agreed.queue, agreed.backend, agreed.task, text, idempotency_key
    )
    return NewJob(agreed, text, signed, idempotency_key)


def prepare(
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    **options: Any,
) -> NewJob:
    """Return one checked job: `terms` of ``options``, and a `call` on them."""
    return call(terms(**options), args, kwargs, idempotency_key)


def _lease_seconds(lease_seconds: float | None, settings: conf.RelaySettings) -> float:
    if lease_seconds is None:
        return settings.lease_seconds
    low, high = settings.min_lease_seconds, settings.max_lease_seconds
    return bounds.seconds("lease_seconds", lease_seconds, low, high)


def _default_backoff(settings: conf.RelaySettings) -> Backoff:
    jitter = cast(Jitter, settings.backoff_jitter)
    return Backoff(settings.backoff_base_seconds, settings.backoff_max_seconds, jitter)
