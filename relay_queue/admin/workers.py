"""The page of worker processes, those that have stopped included."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from relay_queue.admin.acts.workers import WorkerActs
from relay_queue.admin.lists.filters import PresenceFilter
from relay_queue.admin.reading import ReadingAdmin
from relay_queue.models import Worker


class StoppedFilter(PresenceFilter):
    """Filters by whether the worker has been seen to end."""

    title = _("stopped")
    parameter_name = "stopped"
    field = "stopped_at"
    present = _("Stopped")
    absent = _("Running")


@admin.register(Worker)
class WorkerAdmin(WorkerActs, ReadingAdmin):
    """Worker processes, the newest first."""

    list_display = (
        "name",
        "host",
        "pid",
        "concurrency",
        "started_at",
        "heartbeat_at",
        "ordered",
        "stopped_at",
        "stop_reason",
        "claimed",
        "succeeded",
        "failed",
        "refused",
    )
    list_filter = (StoppedFilter,)
    search_fields = ("name", "host")
    search_help_text = _("A part of the name or of the host")
    ordering = ("-id",)
    # The incarnation names the worker's lock file; it says nothing to people.
    exclude = ("incarnation", "lock_device", "lock_inode", "session_lock")
