"""Links: from a number to the list of the rows that it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from relay_queue.admin import sight
from relay_queue.models import Lease
from relay_queue.quantities import number
from relay_queue.states import INTERRUPTED, Outcome, State


@dataclass(frozen=True, slots=True)
class Links:
    """Links to the pages that one visitor may see at one site. A link to another page is empty."""

    request: HttpRequest
    site: AdminSite

    def jobs(self, state: State, queue: str = "", **since: datetime) -> str:
        """Return the address of the jobs in a state; ``since`` is by the field of a time."""
        query = {"state__exact": state.value, **({"queue": queue} if queue else {})}
        return self._list("job", query | _since(since))

    def refused(self, since: datetime) -> str:
        """Return the address of the leases with a late return."""
        return self._list("lease", {"refused": "yes", **_since({"refused_at": since})})

    def interrupted(self, since: datetime) -> str:
        """Return the address of the leases that ended without their owner."""
        outcomes = ",".join(INTERRUPTED)
        return self._list("lease", {"outcome__in": outcomes, **_since({"ended_at": since})})

    def failed(self, since: datetime) -> str:
        """Return the address of the attempts that failed."""
        outcomes = ",".join([Outcome.FAILED, Outcome.FATAL, Outcome.TIMED_OUT])
        return self._list("lease", {"outcome__in": outcomes, **_since({"ended_at": since})})

    def held_by(self, worker_id: int) -> str:
        """Return the address of the open leases of a worker."""
        return self._list("lease", {"ended": "no", "worker__id__exact": str(worker_id)})

    def attempts_of(self, worker_id: int) -> str:
        """Return the address of all leases of a worker."""
        return self._list("lease", {"worker__id__exact": str(worker_id)})

    def job(self, job_id: int) -> str:
        """Return the address of the page of a job."""
        return self._address("job", "change", str(job_id))

    def queue(self, name: str) -> str:
        """Return the address of the page of a queue."""
        return self._address("queue", "change", quote(name))

    def queues(self) -> str:
        """Return the address of all queues, where they can be searched."""
        return self._list("queue", {})

    def worker(self, worker_id: int) -> str:
        """Return the address of the page of a worker."""
        return self._address("worker", "change", str(worker_id))

    def workers(self) -> str:
        """Return the address of all workers."""
        return self._list("worker", {})

    def _list(self, model: str, query: Mapping[str, str]) -> str:
        address = self._address(model, "changelist")
        return f"{address}?{urlencode(query)}" if address and query else address

    def _address(self, model: str, page: str, *args: str) -> str:
        label = Lease._meta.app_label
        if not sight.may_view(self.request, self.site, apps.get_model(label, model)):
            return ""
        name = f"admin:{label}_{model}_{page}"
        try:
            return reverse(name, args=args, current_app=self.site.name)
        except NoReverseMatch:  # a site of the project may have fewer pages
            return ""


def linked(text: object, address: str) -> SafeString:
    """Return a text as a link, or as it is when there is no address."""
    if not address:
        return format_html("{}", text)
    return format_html('<a href="{}">{}</a>', address, text)


def counted(n: int, address: str) -> SafeString:
    """Return a number with its link; a zero has a quiet colour and no link."""
    if not n:
        return format_html('<span class="relay-zero">{}</span>', "0")
    return linked(number(n), address)


def _since(moments: Mapping[str, datetime]) -> dict[str, str]:
    return {f"{name}__gte": moment.isoformat() for name, moment in moments.items()}
