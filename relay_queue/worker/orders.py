"""What an operator has told this very process, read from its row."""

from __future__ import annotations

from relay_queue.query import looks
from relay_queue.states import WorkerOrder


class Orders:
    """The order on a worker's row. Reads only.

    The row and not a signal carries it: whoever can write the database can order, from any machine,
    and an order that is given while the worker is stopped or busy is still there when it looks.
    """

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id
        self._order = ""

    @property
    def quiet(self) -> bool:
        """Whether nothing more is to be claimed."""
        return self._order == WorkerOrder.QUIET

    @property
    def stop(self) -> bool:
        """Whether the process is to finish what runs, and end."""
        return self._order == WorkerOrder.STOP

    @property
    def stop_reason(self) -> str:
        """What to write on the row of a process that ends."""
        return "stopped by an operator" if self.stop else "stopped"

    def read(self) -> bool:
        """Read the order, and say whether it is another than before."""
        before, self._order = self._order, looks.order_of(self._worker_id)
        return self._order != before
