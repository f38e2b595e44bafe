"""The loop of a worker process: wait, read, tick, apply, start.

It alone works with the queue's tables. Slots run functions; the loop owns the connection, the leases
and the time limits. It never waits for the database longer than a slice. So it keeps time limits and
orders while others hold the writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from django.db import Error

from relay_queue import conf
from relay_queue.logs import get_logger
from relay_queue.query import looks
from relay_queue.states import State
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker.attempt import Attempt
from relay_queue.worker.database import COMMIT, MAX_PAUSE_SECONDS, READ, Database, Failures
from relay_queue.worker.identity import Identity
from relay_queue.worker.leases import InFlight
from relay_queue.worker.liveness import CONFIRM_SECONDS, DeadWorkers
from relay_queue.worker.options import DISMISSED, READY, WorkerOptions
from relay_queue.worker.pacing import Pace, QueueWatch, Timers
from relay_queue.worker.plan import CLAIM, COUNT, FIRE, PROMOTE, RECOVER, Done, Plan
from relay_queue.worker.services import Housekeeper
from relay_queue.worker.slots import Slots
from relay_queue.worker.stats import Stats
from relay_queue.worker.tick import passed, tick
from relay_queue.worker.waiting import Orders, Waiting, Woken
from relay_queue.worker.watchdog import (
    EXIT_STUCK,
    StuckWatch,
    exit_if_gate_is_hogged,
    shown_ids,
)

logger = get_logger("relay_queue.worker")

FRUITLESS_REST_SECONDS = 1.0
"""Pause after a claim for some backends only that found nothing."""

LEAVE_SECONDS = 10.0
"""How long a worker tries to write its last outcomes: less than the supervisor waits after QUIT."""

HAND_OVER_SECONDS = 0.001
"""How long a loop that could go on leaves the interpreter to the functions that it has started."""

WAITING = frozenset({State.RETRYING, State.SCHEDULED})


class Loop:
    """One worker's life after registration. Reads by `looks`, and writes only by `tick`."""

    def __init__(self, options: WorkerOptions, identity: Identity, waiting: Waiting) -> None:
        self.options = options
        self.identity = identity
        self.waiting = waiting
        self.timers = Timers()
        self.pace = Pace()
        self.database = Database(self._reopened)
        self.failures = Failures(self.database, self.timers, self.pace)
        self.slots = Slots(options.concurrency, self.waiting.wake)
        self.in_flight = InFlight(self.slots, self.pace, identity.registered.incarnation)
        self.queues = QueueWatch(options, self.pace, self.timers)
        self.orders = Orders(identity.worker_id)
        self.dead = DeadWorkers()
        self.stats = Stats()
        self.housekeeper = Housekeeper()
        self.stuck = StuckWatch()
        self.backends = None if options.backend is None else [options.backend]
        self.claimed = 0
        self.handing_over = False
        self.wanted_since: float | None = None
        """Since when the loop has wanted to write; None once a tick is committed."""

        self.stop_by: float | None = None
        self.exit_code: int | None = None
        self.left = False
        """Whether everything was handed back and the row was marked as stopped."""

    def run(self) -> int:
        """Recover, say READY, serve until told to stop, hand back what is left."""
        self._turn_until(self._started)
        if self.exit_code is None:
            self.waiting.say(READY)
        self._turn_until(self._over)
        if self.exit_code == 0:
            self._leave()
        self._say_what_is_lost()
        self.database.close()
        self.waiting.close()
        return self.exit_code or 0

    def _turn_until(self, over: Callable[[], bool]) -> None:
        while self.exit_code is None:
            try:
                if over():
                    return
                self._turn()
            except Error as error:  # of a read; a tick keeps its own
                self._failed(error, READ)

    def _turn(self) -> None:
        """Wait, read, tick. A committed tick is applied, and what it claimed is started."""
        woken = self.waiting.wait(self._seconds_to_wait())
        self.handing_over = False
        if woken.drain or woken.quit:
            self._stop(at_once=woken.quit)
        self.timers.overslept(woken.late_seconds)
        self._keep_time_limits()  # before the first read, which may find the database locked
        self.queues.note(woken)
        with self.database:
            # Asked again: a read that failed goes on with a new connection.
            if self.database.usable() and self._read(woken) and self.database.usable():
                if self._wants_tick() and self.timers.retry_in() == 0:
                    self._tick()
                elif self.housekeeper.due():
                    self.housekeeper.step()

    # -- wait

    def _seconds_to_wait(self) -> float:
        if self.database.lost:
            return self.database.retry_in()
        if self._wants_tick() or self.queues.check_due:
            pause = HAND_OVER_SECONDS if self.handing_over else 0.0
            return max(pause, self.timers.retry_in())
        return self.timers.seconds_until(
            self.in_flight.leases.next_event(time.monotonic()),
            self.housekeeper.next_at,
            self.stop_by,
            self.stuck.given_up_at,
            dirty=self.stats.dirty,
        )

    def _keep_time_limits(self) -> None:
        self.in_flight.keep_time_limits(self.wanted_since)
        if self.slots.busy:  # what else holds the gate is for the supervisor to end
            exit_if_gate_is_hogged(self.slots.stuck_threads, self.in_flight.outcomes.job_ids)

    # -- read

    def _read(self, woken: Woken) -> bool:
        """Read what the bell, the supervisor and the timers ask for; say whether to go on."""
        if self.identity.has_come_back():
            self.timers.write_soon()
        try:
            if self.queues.read(may_claim_at_once=self._may_claim_at_once()):
                self.in_flight.check_leases(self.identity.worker_id)
            if woken.look or self.timers.probe_due():
                self._probe()
                if self.failures.hindrance:
                    self.failures.passed(READ, *self._nothing_to_do())
        except Error as error:  # outcomes and renewals need not wait for what cannot be read
            self._failed(error, READ)
            return not self.database.lost and self.exit_code is None
        return True

    def _nothing_to_do(self) -> set[str]:
        """Return the steps for which a probe has found nothing: what failed of them is gone."""
        steps = set()
        if not (self.timers.overdue or self.dead.probes):
            steps |= {RECOVER, PROMOTE, FIRE}
        if self.orders.quiet or self.stop_by is not None:
            steps.add(CLAIM)
        return steps

    def _probe(self) -> None:
        """See which workers have died, and when the next lease ends: claims do not ring."""
        self.timers.probed()
        self.timers.plan(*looks.next_times())
        self.dead.find(conf.get().database, self.identity.worker_id)
        if self.dead.suspects:
            self.timers.probe_in(CONFIRM_SECONDS)
        if self.orders.read():
            if self.orders.stop:
                self.waiting.say(DISMISSED)  # before the end, which looks like any other
                self._stop(at_once=False)
            self.pace.more = True  # a worker that is no longer quiet has claims to catch up with

    def _reopened(self) -> None:
        """The last tick may have been committed, and other workers may have lost their sessions."""
        self.in_flight.suspect_last_commit()
        self.dead.suspend_judgement()
        self.timers.look_soon()

    def _may_claim_at_once(self) -> bool:
        """Whether a ring can be answered by a claim: no outcome waits, and the claim is cheap."""
        # Jobs of other backends have no index of their own to be passed over by.
        nothing_else = not self.slots.busy and not self.in_flight.outcomes.wait
        return nothing_else and self.backends is None and self._may_claim() > 0

    # -- tick

    def _wants_tick(self) -> bool:
        return bool(
            not self.in_flight.all_written
            or self.timers.due
            or self.timers.recovering
            or self.dead.probes
            or self._places() > 0
            or self.timers.write_due(self.stats.dirty)
            or self.in_flight.leases.to_renew(time.monotonic())
        )

    def _places(self) -> int:
        """How many jobs are to be claimed now."""
        return self.pace.ask(self._may_claim())

    def _may_claim(self) -> int:
        """How many jobs may be claimed now, if there are any."""
        may_claim = self.timers.may_claim() and self.identity.is_proven
        if self.stop_by is not None or self.orders.quiet or not may_claim:
            return 0
        free = self.slots.free
        if self.options.max_jobs is not None:
            free = min(free, self.options.max_jobs - self.claimed)
        return free

    def _tick(self) -> None:
        began = time.monotonic()
        self.wanted_since = self.wanted_since or began
        plan = self._plan(began, began - self.wanted_since)
        try:
            done = tick(plan)
        except Exception as error:  # noqa: BLE001 - what an altered row makes us raise is open
            self._failed(error, COMMIT)
            return
        finally:
            self.timers.overslept(time.monotonic() - began)
        self.wanted_since = None
        self._apply(plan, done, began)
        if done.faults or self.failures.hindrance:
            self.failures.left_undone(done.faults, passed(plan, done), claimed=bool(done.claims))
        else:
            self.failures.careful = False

    def _plan(self, now: float, waited_seconds: float) -> Plan:
        return Plan(
            worker_id=self.identity.worker_id,
            registered=self.identity.registered,
            order=self.orders.current,
            settlements=self._settlements,
            places=self._places,
            queues=self.pace.ring(self.queues.queues),
            backends=self.backends,
            lease_seconds=self.options.lease_seconds,
            suspects=max(0, 1 - self.in_flight.leases.suspects()),
            renew=self.in_flight.leases.to_renew(now),
            due=self.timers.due or self.timers.recovering,
            may_expire=self.timers.may_recover(waited_seconds),
            dead=self.dead,
            stats=self.stats if self.timers.write_due(self.stats.dirty) else None,
            hindrance=self.failures.hindrance.reason,
            careful=self.failures.careful,
            overdrawn=self._overdrawn,
        )

    def _settlements(self) -> Sequence[Settlement]:
        self.waiting.forget_wakes()
        return self.in_flight.outcomes.collect()

    def _overdrawn(self) -> tuple[Sequence[Attempt], float]:
        return self.in_flight.overdrawn(self.wanted_since)

    def _failed(self, error: Exception, step: str) -> None:
        code = self.failures.met(error, step)
        self.exit_code = self.exit_code if code is None else code

    # -- apply and start

    def _apply(self, plan: Plan, done: Done, began: float) -> None:
        """Persist before apply: only what has been committed changes what we believe and run."""
        if COUNT in done.faults:
            self.stats.unwritten(done.now)
            self.timers.write_in(MAX_PAUSE_SECONDS)
        elif plan.stats is not None:
            # Before the rest of this tick is counted, which goes along with the next write.
            self.stats.written(done.now)
            self.timers.written()
        self._apply_answers(done)
        self._start(done.claims, began)
        self.in_flight.leases.renewed(done.renewed, began)
        for lease_id in done.lost:
            self.in_flight.lose(lease_id, "the lease had ended when it was to be renewed")
        if plan.dead.probes and RECOVER not in done.faults:
            plan.dead.forget()
        self.timers.ticked(done.moved)
        self.stats.recovered(done.recovered, done.now)
        self.stats.claimed(done.claims, done.now)
        self.pace.learn(done.asked, done.claims)
        if done.asked and not done.claims and self.backends is not None:
            # Jobs of other backends have no index of their own to be passed over by.
            self.pace.rest(FRUITLESS_REST_SECONDS)
        if done.moved:
            self._share_work()

    def _apply_answers(self, done: Done) -> None:
        answers, seconds = self.in_flight.outcomes.committed(done.answers)
        self.stats.settled(answers, seconds, done.now)
        waits = room = False
        for answer in answers:
            attempt = self.in_flight.leases.drop(answer.lease_id)
            if answer.reason:
                logger.warning("Lease %s was refused: %s.", answer.lease_id, answer.reason)
            waits = waits or answer.state in WAITING
            # Ready again is a job that was handed back.
            room = room or answer.queue in self.queues.limited or answer.state == State.READY
            if attempt is not None and attempt.claim.suspect:
                self.pace.more = True  # with this suspect gone another may be claimed
        if waits:
            self.timers.look_soon()
        if room:
            self._share_work()

    def _start(self, claims: Sequence[Claim], began: float) -> None:
        self.in_flight.start(claims, began)
        self.claimed += len(claims)
        self.handing_over = bool(claims)

    def _share_work(self) -> None:
        """There may be jobs, or room for them, that no worker has been told of."""
        self.pace.more = True
        self.database.ring()

    # -- the beginning and the end

    def _started(self) -> bool:
        """Whether this worker is ready; the supervisor counts no time without the database."""
        self.waiting.hold_up(self.database.lost or self.wanted_since is not None)
        return not self.timers.recovering or self.stop_by is not None

    def _stop(self, *, at_once: bool) -> None:
        if at_once or self.stop_by is None:
            patience_seconds = 0.0 if at_once else self.options.shutdown_timeout_seconds
            self.stop_by = time.monotonic() + patience_seconds

    def _over(self) -> bool:
        """Decide whether the life of this worker is over; sets the exit code."""
        written, slots = self.in_flight.all_written, self.slots
        idle = written and not self.in_flight.at_work
        if self.stop_by is not None:
            if idle or time.monotonic() >= self.stop_by:
                self.exit_code = 0
        elif written and self.stuck.given_up(slots.stuck, slots.places):
            self.exit_code = EXIT_STUCK
        elif idle and self._nothing_left():
            self.exit_code = 0
        return self.exit_code is not None

    def _nothing_left(self) -> bool:
        if self.options.max_jobs is not None and self.claimed >= self.options.max_jobs:
            return True
        busy = not self.options.drain or self.pace.more or self.timers.due
        if busy or not self.database.usable():
            return False
        served = self.options.served(self.queues.queues)
        return looks.busy_queues(self.backends).isdisjoint(served)

    def _say_what_is_lost(self) -> None:
        """Name the jobs whose outcomes this process takes along: the database did not take them."""
        held = self.in_flight.leases.ids()
        # Whose lease was handed back has nothing to lose: its job is ready again already.
        unwritten = self.in_flight.outcomes.in_hand().items()
        if jobs := [a.claim.job_id for n, a in unwritten if n in held and a.settled is None]:
            logger.error(
                "The outcomes of %d jobs %s: %s. Those that were not are run again by another worker.",
                len(jobs),
                "may not have been written" if self.exit_code else "could not be written",
                shown_ids(jobs),
            )

    def _leave(self) -> None:
        """Hand back what is unfinished, uncharged, and mark the row as stopped."""
        self.stop_by = self.stop_by or time.monotonic()
        outcomes = self.in_flight.outcomes
        outcomes.hand_back(self.in_flight.leases)
        give_up = time.monotonic() + LEAVE_SECONDS
        while outcomes.wait and self.exit_code == 0 and time.monotonic() < give_up:
            time.sleep(max(self.timers.retry_in(), self.database.retry_in()))
            with self.database:
                if self.database.usable():
                    self._tick()
        if not outcomes.wait:
            self.left = self.identity.sign_off(self.orders.stop_reason, LEAVE_SECONDS)
        self._share_work()
        self.dead.close()
        self.slots.close()
