"""The acts on workers: quiet, serve again, stop."""

from __future__ import annotations

from typing import ClassVar

from relay_queue.admin.acts.catalogue import WORKER_ACTS, Act
from relay_queue.admin.acts.pages import Acts
from relay_queue.models import Worker


class WorkerActs(Acts):
    """Adds the acts on workers to their list and to the page of a worker."""

    acts: ClassVar[tuple[Act, ...]] = WORKER_ACTS
    acts_model = Worker
