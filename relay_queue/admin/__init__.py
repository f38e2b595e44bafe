"""The console: Django admin pages over the tables of the queue."""

from relay_queue.admin.actions.bulkpage import BulkActAdmin
from relay_queue.admin.dashboard.page import DashboardAdmin
from relay_queue.admin.jobs import DeadLetterAdmin, JobAdmin, RetryAdmin
from relay_queue.admin.leases import LeaseAdmin
from relay_queue.admin.queues import QueueAdmin
from relay_queue.admin.workers import WorkerAdmin

__all__ = [
    "BulkActAdmin",
    "DashboardAdmin",
    "DeadLetterAdmin",
    "JobAdmin",
    "LeaseAdmin",
    "QueueAdmin",
    "RetryAdmin",
    "WorkerAdmin",
]
