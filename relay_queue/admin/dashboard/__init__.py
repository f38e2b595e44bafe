"""The dashboard: the state of all queues and workers, on one page that refreshes itself."""

from relay_queue.admin.dashboard.page import DashboardAdmin

__all__ = ["DashboardAdmin"]
