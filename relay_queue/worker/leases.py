"""What this process holds, and what it will say of it: leases, and the outcomes of their attempts.

The wall clock may jump; what a worker believes of its own leases must not jump with it. So times
are monotonic here. They are counted from before the transaction that granted a lease, so the
worker's belief ends before the lease does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from time import monotonic

from relay_queue.context import TIMED_OUT, JobContext
from relay_queue.exceptions import TimedOut
from relay_queue.query import looks
from relay_queue.store.records import Claim, Settled, Settlement
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.pacing import Pace
from relay_queue.worker.slots import Slots


class Leases:
    """All attempts of this process whose leases are neither settled nor lost, by lease id."""

    def __init__(self) -> None:
        self._held: dict[int, Attempt] = {}
        # No lease needs anything before this time. It may be too early, never too late. It spares
        # a look at every lease at every turn of the loop.
        self._quiet_until = inf

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._held

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._held.values()))

    def add(self, attempt: Attempt) -> None:
        """Begin to hold the lease of an attempt."""
        self._held[attempt.claim.lease_id] = attempt
        event = attempt.until - attempt.claim.lease_seconds / 2
        if attempt.context.deadline is not None:
            event = attempt.next_event()
        self._quiet_until = min(self._quiet_until, event)

    def drop(self, lease_id: int) -> Attempt | None:
        """Stop holding a lease: it was settled, or lost."""
        return self._held.pop(lease_id, None)

    def ids(self) -> set[int]:
        """Return the ids of all leases held."""
        return set(self._held)

    def suspects(self) -> int:
        """Count the jobs among them that cost two owners in a row."""
        return sum(attempt.claim.suspect for attempt in self._held.values())

    def to_renew(self, now: float) -> list[Attempt]:
        """Return the leases past half of their life, and those nearly so: one write for all."""
        if now < self._quiet_until:
            return []
        held = self._held.values()
        if not any(attempt.renew_from() <= now for attempt in held):
            return []
        return [a for a in held if a.renew_from() - a.claim.lease_seconds / 8 <= now]

    def renewed(self, lease_ids: Iterable[int], since: float) -> None:
        """Note that leases were extended by a transaction that was wanted at ``since``."""
        for lease_id in lease_ids:
            attempt = self._held[lease_id]
            attempt.until = since + attempt.claim.lease_seconds

    def past_timeout(self, now: float) -> list[Attempt]:
        """Return the attempts whose function has run past its time limit and does not say so."""
        if now < self._quiet_until:
            return []
        return [a for a in self._held.values() if a.context.overdue_from <= now]

    def expired(self, now: float) -> list[Attempt]:
        """Return the attempts whose lease ran out before this process could renew it."""
        if now < self._quiet_until:
            return []
        return [attempt for attempt in self._held.values() if attempt.until <= now]

    def next_event(self, now: float) -> float | None:
        """Return when the next renewal or time limit is, or may be, in monotonic seconds."""
        if now >= self._quiet_until:
            self._quiet_until = min((a.next_event() for a in self._held.values()), default=inf)
        return None if self._quiet_until == inf else self._quiet_until


class Outcomes:
    """Settlements that wait for a commit. They are kept until one has taken them.

    Those of finished attempts are in ``finished``. In ``by_loop`` are those that the loop makes for
    functions that go on.
    """

    def __init__(self, take_finished: Callable[[], list[Attempt]]) -> None:
        self.by_loop: list[Settlement] = []
        self.finished: list[Attempt] = []
        self._take_finished = take_finished

    @property
    def wait(self) -> bool:
        """Whether something collected has not been taken by a commit."""
        return bool(self.by_loop or self.finished)

    @property
    def job_ids(self) -> list[int]:
        """The jobs whose functions have returned and whose outcomes no commit has taken."""
        return [a.claim.job_id for a in self.finished if a.settled is None]

    def in_hand(self) -> Mapping[int, Attempt]:
        """Take what has finished, and return by lease id all that no commit has taken."""
        self.finished += self._take_finished()
        return self._by_lease()

    def collect(self) -> Sequence[Settlement]:
        """Take what has finished, and return all that is to be settled."""
        self.finished += self._take_finished()
        own = [attempt.settlement for attempt in self.finished if attempt.settled is None]
        if not self.by_loop:
            return own
        finished = self._by_lease()
        self.by_loop = [
            settlement
            for settlement in self.by_loop
            if not supersedes(finished.get(settlement.lease_id), settlement)
        ]
        return self.by_loop + own

    def committed(self, answers: Sequence[Settled]) -> tuple[list[Settled], Mapping[int, float]]:
        """Forget what a commit has taken; return all answers, and the run times by lease.

        What got no answer could not be stored, and waits for the next commit.
        """
        seconds = {attempt.claim.lease_id: attempt.run_seconds for attempt in self.finished}
        own = [attempt.settled for attempt in self.finished if attempt.settled is not None]
        if len(answers) == len(self.by_loop) + len(self.finished) - len(own):
            self.by_loop, self.finished = [], []
        else:
            self._keep_all_but({answer.lease_id for answer in answers})
        return [*answers, *own], seconds

    def mark_repeated(self) -> None:
        """Settle all of it as a repetition: the commit that was to take it may have happened."""
        for settlement in self.by_loop:
            settlement.repeated = True
        for attempt in self.finished:
            attempt.settlement.repeated = True

    def hand_back(self, attempts: Iterable[Attempt]) -> None:
        """Release the jobs of functions that still run, since the worker stops, and tell them."""
        done = self.in_hand()
        for attempt in attempts:
            if attempt.claim.lease_id not in done:
                self.by_loop.append(attempt.claim.settlement("release"))
                attempt.context.cancel("the worker is stopping")

    def disown(self, ours: Mapping[int, str], known: Collection[int]) -> None:
        """Release those of our leases that this process does not know: a lost commit granted them.

        ``ours`` are the tokens of all open leases of this worker.
        """
        settled = {settlement.lease_id for settlement in self.by_loop} | self._by_lease().keys()
        for lease_id, token in ours.items():
            if lease_id not in known and lease_id not in settled:
                self.by_loop.append(Settlement("release", lease_id, token, unrun=True))

    def _by_lease(self) -> dict[int, Attempt]:
        return {attempt.claim.lease_id: attempt for attempt in self.finished}

    def _keep_all_but(self, answered: Collection[int]) -> None:
        self.by_loop = [s for s in self.by_loop if s.lease_id not in answered]
        self.finished = [
            attempt
            for attempt in self.finished
            if attempt.settled is None and attempt.claim.lease_id not in answered
        ]


def supersedes(finished: Attempt | None, settlement: Settlement) -> bool:
    """Whether a finished attempt makes the loop's settlement of the same lease obsolete.

    Settled first, the loop's would make the function's own look like a late return. The function
    ended within its time limit or stopped at it. Or its ack is committed already. Or it succeeded
    while the loop was about to hand its job back.
    """
    if finished is None:
        return False
    acked = settlement.verb == "release" and finished.settlement.verb == "ack"
    in_time = settlement.timed_out and finished.in_time
    return in_time or finished.settlement.timed_out or finished.settled is not None or acked


def timed_out(claim: Claim) -> Settlement:
    """Fail an attempt that ran past its time limit and has not ended."""
    return claim.settlement(
        "nack",
        error=f"{TimedOut.__module__}.{TimedOut.__qualname__}",
        message=f"TimedOut: the attempt ran past its timeout of {claim.timeout_seconds:g} s",
        timed_out=True,
    )


class InFlight:
    """All jobs that this process has claimed and not settled: their leases, slots and outcomes.

    ``worker`` is the incarnation of the process, for the contexts of the functions.
    """

    def __init__(self, slots: Slots, pace: Pace, worker: str) -> None:
        self.slots = slots
        self.leases = Leases()
        self.outcomes = Outcomes(slots.take_finished)
        self._pace = pace
        self._worker = worker
        self._in_doubt = False

    @property
    def all_written(self) -> bool:
        """Whether no outcome waits for a commit."""
        return not (self.slots.has_finished or self.outcomes.wait)

    @property
    def at_work(self) -> bool:
        """Whether functions run whose leases are ours; a job whose lease is over is not ours."""
        return self.slots.busy > self.slots.stuck

    def start(self, claims: Sequence[Claim], since: float) -> None:
        """Hold and run jobs whose claiming transaction was wanted at ``since``."""
        for claim in claims:
            context = JobContext.of(claim, self._worker)
            attempt = Attempt(claim, context, since + claim.lease_seconds)
            self.leases.add(attempt)
            self.slots.start(attempt)

    def lose(self, lease_id: int, reason: str) -> None:
        """Give a lease up, and tell its function to stop; its slot is taken until that returns."""
        attempt = self.leases.drop(lease_id)
        if attempt is not None:
            attempt.context.cancel(reason)
            self.slots.mark_stuck(attempt)
            if attempt.claim.suspect:
                self._pace.more = True  # another suspect may be claimed now

    def suspect_last_commit(self) -> None:
        """Note a lost connection: the last tick may have been committed, or not."""
        self.outcomes.mark_repeated()
        self._in_doubt = True

    def check_leases(self, worker_id: int) -> None:
        """Read which leases are still open; release those that this process does not know."""
        held = self.leases.ids()
        if self._in_doubt:
            known = held | self.slots.stuck_leases()
            self.outcomes.disown(looks.leases_of(worker_id), known)
            self._in_doubt = False
        for lease_id in held - looks.open_leases(held):
            self.lose(lease_id, "the job was cancelled, or another ended its lease")

    def keep_time_limits(self, wanted_since: float | None) -> None:
        """Give up the attempts that ran past their time limit, and the leases that ran out.

        ``wanted_since`` is since when the loop has wanted to write, None if it does not.
        """
        now = monotonic()
        late, expired = self.leases.past_timeout(now), self.leases.expired(now)
        if late or expired:
            # Taken first: a function is judged by when it returned, not by when the loop sees it.
            own = self.outcomes.in_hand()
            self._end_late(late, own)
            self._end_expired(expired, own, wanted_since)

    def overdrawn(self, wanted_since: float | None) -> tuple[Sequence[Attempt], float]:
        """Return the leases that ran out while the loop waited to write, and for how many seconds."""
        now = monotonic()
        expired = self.leases.expired(now)
        if not expired:
            return (), 0.0
        own = {attempt.claim.lease_id: attempt for attempt in self.outcomes.finished}
        waits = [(a, _waits_since(own.get(a.claim.lease_id), wanted_since)) for a in expired]
        overdrawn = [(attempt, since) for attempt, since in waits if since < attempt.until]
        waited_seconds = now - min((since for _, since in overdrawn), default=now)
        return [attempt for attempt, _ in overdrawn], waited_seconds

    def _end_late(self, late: Sequence[Attempt], own: Mapping[int, Attempt]) -> None:
        for attempt in late:
            finished = own.get(attempt.claim.lease_id)
            if finished is None or not finished.in_time:
                self.outcomes.by_loop.append(timed_out(attempt.claim))
                self.lose(attempt.claim.lease_id, TIMED_OUT)

    def _end_expired(
        self, expired: Sequence[Attempt], own: Mapping[int, Attempt], wanted_since: float | None
    ) -> None:
        """Give up leases that ran out, except for those that the loop could not write of.

        The latter are ours until another process ends them, which the next tick finds out. Their
        functions are told to stop all the same: another worker may have their jobs by now.
        """
        for attempt in expired:
            lease_id = attempt.claim.lease_id
            if _waits_since(own.get(lease_id), wanted_since) < attempt.until:
                attempt.context.cancel("the lease ran out while the database was waited for")
            else:
                self.lose(lease_id, "the lease ran out before it could be renewed")


def _waits_since(finished: Attempt | None, wanted_since: float | None) -> float:
    """Return since when the loop has wanted to write of a lease; infinity if it does not."""
    returned_at = inf if finished is None else finished.returned_at
    return min(returned_at, inf if wanted_since is None else wanted_since)
