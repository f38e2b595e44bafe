"""The dashboard: how all queues stand, on one page that refreshes itself."""

from relay_queue.admin.dashboard.page import DashboardAdmin

__all__ = ["DashboardAdmin"]
