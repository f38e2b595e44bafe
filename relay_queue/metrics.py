"""``/metrics`` for Prometheus: how the queues and workers stand, and what was done today.

Everything is read from the database at each scrape, so all web processes give the same answer and
nothing is lost when one restarts. Counters start over at midnight UTC, which Prometheus takes for
the restart of a process. Sums over all time would fall when old minutes are pruned.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator

from django.http import HttpRequest, HttpResponse, HttpResponseForbidden
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from relay_queue import conf
from relay_queue.query import history, looks, status
from relay_queue.states import State

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import choose_encoder
except ImportError as error:
    raise ImportError(
        'relay_queue.metrics needs prometheus-client: install "django-relay-queue[metrics]"'
    ) from error

RECENT_MINUTES = 5
QUANTILES = (0.5, 0.95)


class Collector:
    """Reads the tables once for each scrape, and writes nothing."""

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield from _queues()
        yield from _events()
        yield from _durations()
        yield from _workers()


@require_safe
@never_cache
def view(request: HttpRequest) -> HttpResponse:
    """Answer a scrape that has the token, or staff who may view queues in the admin."""
    if not _is_allowed(request):
        return HttpResponseForbidden(
            'Send the token of RELAY["METRICS_TOKEN"] as "Authorization: Bearer", or sign in to '
            "the admin as somebody who may view queues.\n",
            content_type="text/plain; charset=utf-8",
        )
    registry = CollectorRegistry()
    registry.register(Collector())
    encode, content_type = _encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return the encoder that a header asks for, or the plain one if that cannot be understood."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number, which anybody may send
        return choose_encoder("")


def _is_allowed(request: HttpRequest) -> bool:
    token = conf.get().metrics_token
    if token is not None:
        said = request.headers.get("Authorization", "")
        if hmac.compare_digest(said.encode(), f"Bearer {token}".encode()):
            return True
    user = getattr(request, "user", None)  # without sessions there are no users
    # As the admin asks, where these numbers also stand: a permission alone opens no page of it.
    if user is None or not (user.is_active and user.is_staff):
        return False
    return bool(user.has_perm("relay_queue.view_queue"))


def _queues() -> Iterator[Metric]:
    jobs = GaugeMetricFamily("relay_jobs", "Jobs by state.", labels=["queue", "state"])
    oldest = GaugeMetricFamily(
        "relay_oldest_ready_seconds", "How long the oldest ready job has waited.", labels=["queue"]
    )
    capacity = GaugeMetricFamily(
        "relay_queue_capacity", "Unfinished jobs that a queue admits, if limited.", labels=["queue"]
    )
    paused = GaugeMetricFamily("relay_queue_paused", "1 while paused.", labels=["queue"])
    for queue in status.queues(looks.now()):
        for state in State:
            jobs.add_metric([queue.name, state.value], queue.counts.get(state, 0))
        oldest.add_metric([queue.name], queue.oldest_wait_seconds or 0.0)
        paused.add_metric([queue.name], float(queue.paused_at is not None))
        if queue.capacity is not None:
            capacity.add_metric([queue.name], queue.capacity)
    yield from (jobs, oldest, capacity, paused)


def _events() -> Iterator[Metric]:
    events = CounterMetricFamily(
        "relay_events",
        "Events of jobs since midnight UTC: claims, ends of attempts, and late returns.",
        labels=["queue", "event"],
    )
    midnight = looks.now().replace(hour=0, minute=0, second=0, microsecond=0)
    for queue, counts in history.events_since(midnight).items():
        for event, n in counts.items():
            events.add_metric([queue, event], n)
    yield events


def _durations() -> Iterator[Metric]:
    found = history.recent(looks.now(), RECENT_MINUTES)
    told = f"of the last {RECENT_MINUTES} minutes, estimated."
    for name, help_text, histogram in (
        ("relay_wait_seconds", f"From due to claimed, {told}", found.wait),
        ("relay_run_seconds", f"How long functions ran, {told}", found.run),
    ):
        family = GaugeMetricFamily(name, help_text, labels=["quantile"])
        for share in QUANTILES:
            seconds = histogram.percentile(share)
            if seconds is not None:
                family.add_metric([str(share)], seconds)
        yield family


def _workers() -> Iterator[Metric]:
    labels = ["worker", "host"]
    age = GaugeMetricFamily(
        "relay_worker_heartbeat_age_seconds", "Since a worker was last heard.", labels=labels
    )
    leases = GaugeMetricFamily("relay_worker_leases", "Jobs that a worker holds.", labels=labels)
    slots = GaugeMetricFamily("relay_worker_slots", "Jobs that it can hold.", labels=labels)
    live = [w for w in status.workers(looks.now()) if w.row.stopped_at is None]
    for worker in live:
        # The row's number, too: a name and a host may stand for several processes.
        values = [f"{worker.row.name}-{worker.row.pk}", worker.row.host]
        age.add_metric(values, worker.heartbeat_age_seconds)
        leases.add_metric(values, worker.open_leases)
        slots.add_metric(values, worker.row.concurrency)
    yield GaugeMetricFamily("relay_workers", "Workers that have not stopped.", value=len(live))
    yield from (age, leases, slots)
