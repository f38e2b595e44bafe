"""A second admin site, as a project makes one: each person sees the jobs of their own tenant."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import path

from relay_queue import admin as relay
from relay_queue.models import BulkAct, Dashboard, DeadLetter, Job, Lease, Queue, Retry, Worker

SITE = "/tenants/relay_queue/"
tenants = admin.AdminSite(name="tenants")
twin = admin.AdminSite(name="twin")
other_twin = admin.AdminSite(name="twin")


class TenantJobs(relay.JobAdmin):
    """The jobs whose queue begins with the name of the person."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request)
        if request.user.is_superuser:
            return rows
        return rows.filter(queue__startswith=f"{request.user.get_username()}-")

    def has_discard_job_permission(self, request: HttpRequest) -> bool:
        return False


tenants.register(Job, TenantJobs)
twin.register(Job, TenantJobs)
for model, page in (
    (DeadLetter, relay.DeadLetterAdmin),
    (Retry, relay.RetryAdmin),
    (Lease, relay.LeaseAdmin),
    (Queue, relay.QueueAdmin),
    (Worker, relay.WorkerAdmin),
    (BulkAct, relay.BulkActAdmin),
    (Dashboard, relay.DashboardAdmin),
):
    tenants.register(model, page)

urlpatterns = [
    path("admin/", admin.site.urls),
    path("tenants/", tenants.urls),
    path("twin/", other_twin.urls),
]
