"""The console: Django admin pages over the tables of the queue."""

from relay_queue.admin.acts.bulkpage import BulkActAdmin
from relay_queue.admin.dashboard import DashboardAdmin
from relay_queue.admin.jobs import JobAdmin
from relay_queue.admin.leases import LeaseAdmin
from relay_queue.admin.queues import QueueAdmin
from relay_queue.admin.workers import WorkerAdmin

__all__ = [
    "BulkActAdmin",
    "DashboardAdmin",
    "JobAdmin",
    "LeaseAdmin",
    "QueueAdmin",
    "WorkerAdmin",
]
