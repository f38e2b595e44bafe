"""What is to be told of leases, kept until a commit has taken it, whatever happens to a tick."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from relay_queue.store.records import Settled, Settlement
from relay_queue.worker.executor import Finished
from relay_queue.worker.held import Held
from relay_queue.worker.words import again, released, said_better


class Outcomes:
    """The words of finished functions, and those that the loop says for functions that go on."""

    def __init__(self, take_finished: Callable[[], list[Finished]]) -> None:
        self.told: list[Settlement] = []
        self.finished: list[Finished] = []
        self._take_finished = take_finished

    @property
    def wait(self) -> bool:
        """Whether something collected has not been taken by a commit."""
        return bool(self.told or self.finished)

    @property
    def job_ids(self) -> list[int]:
        """The jobs whose functions have returned and whose outcomes no commit has taken."""
        return [f.claim.job_id for f in self.finished if f.settled is None]

    def in_hand(self) -> Mapping[int, Finished]:
        """Take what has finished, and return by lease id all that no commit has taken."""
        self.finished += self._take_finished()
        return {f.settlement.lease_id: f for f in self.finished}

    def collect(self) -> Sequence[Settlement]:
        """Take what has finished, and return all that is to be settled."""
        finished = self.in_hand()
        self.told = [told for told in self.told if not said_better(told, finished)]
        return self.told + [f.settlement for f in self.finished if f.settled is None]

    def committed(self, answers: Sequence[Settled]) -> tuple[list[Settled], Mapping[int, float]]:
        """Forget what a commit has taken; return all answers, and the run times by lease.

        What got no answer could not be stored, and waits for the next commit.
        """
        seconds = {f.settlement.lease_id: f.run_seconds for f in self.finished}
        own = [f.settled for f in self.finished if f.settled is not None]
        if len(answers) == len(self.told) + len(self.finished) - len(own):
            self.told, self.finished = [], []
        else:
            self._keep_all_but({answer.lease_id for answer in answers})
        return [*answers, *own], seconds

    def _keep_all_but(self, answered: Collection[int]) -> None:
        self.told = [told for told in self.told if told.lease_id not in answered]
        self.finished = [
            f for f in self.finished if f.settled is None and f.settlement.lease_id not in answered
        ]

    def doubt(self) -> None:
        """Tell all of it as a repetition: the commit that was to take it may have happened."""
        self.told = [again(told) for told in self.told]
        for finished in self.finished:
            finished.settlement = again(finished.settlement)

    def hand_back(self, leases: Iterable[Held]) -> None:
        """Say for all functions that still run that the worker stops, and their jobs go back."""
        done = self.in_hand()
        for held in leases:
            if held.claim.lease_id not in done:
                self.told.append(released(held.claim))
                held.context.cancel("the worker is stopping")

    def disown(self, ours: Mapping[int, str], known: Collection[int]) -> None:
        """Hand back those of our leases that we do not know: a lost commit has claimed them.

        ``ours`` are the tokens of all open leases of this worker.
        """
        told = {t.lease_id for t in self.told} | {f.claim.lease_id for f in self.finished}
        for lease_id, token in ours.items():
            if lease_id not in known and lease_id not in told:
                self.told.append(Settlement("release", lease_id, token))
