"""The loop of a worker process: wait, look, tick, start. It alone talks to the queue's tables.

Slots run functions; the loop owns the connection, the leases and the time limits. It never waits
for the database longer than a slice, so limits and orders are kept while others hold the writer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from django.db import Error

from relay_queue import conf, store
from relay_queue.context import TIMED_OUT, JobContext
from relay_queue.query import looks
from relay_queue.states import State
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker.database import Database
from relay_queue.worker.executor import Finished
from relay_queue.worker.held import Held, Leases
from relay_queue.worker.hindrance import COMMIT, MAX_PAUSE_SECONDS, READ, Hindrance, in_one_line
from relay_queue.worker.identity import Identity
from relay_queue.worker.listening import Listening
from relay_queue.worker.maintenance import Maintenance
from relay_queue.worker.options import DISMISSED, READY, WorkerOptions
from relay_queue.worker.orders import Orders
from relay_queue.worker.outcomes import Outcomes
from relay_queue.worker.pace import Pace
from relay_queue.worker.siblings import CONFIRM_SECONDS, DeadSiblings
from relay_queue.worker.slots import Slots
from relay_queue.worker.stats import Stats
from relay_queue.worker.tick import CLAIM, COUNT, PROBE, SETTLE, Done, Plan, tick, tried
from relay_queue.worker.timers import Timers
from relay_queue.worker.waiting import Waiting, Woken
from relay_queue.worker.watch import EXIT_STUCK, StuckWatch, exit_if_gate_is_hogged
from relay_queue.worker.words import shown_ids, timed_out

logger = logging.getLogger("relay_queue.worker")

EXIT_UNKNOWN = 70
"""Exit code after an error that leaves the outcome of a commit unknown."""

EXIT_REPLACED = 73
"""Exit code when another file is at the path of the database: a new process opens that one."""

FRUITLESS_REST_SECONDS = 1.0
"""Pause after a claim for some backends only that found nothing."""

LEAVE_SECONDS = 10.0
"""How long a worker tries to write its last outcomes: less than the supervisor waits after QUIT."""

HAND_OVER_SECONDS = 0.001
"""How long a loop that could go on leaves the interpreter to the functions that it has started."""

NEEDED_TO_CLAIM = frozenset({CLAIM, SETTLE, READ, COMMIT})
"""What must be possible before more jobs are claimed."""

WAITING = frozenset({State.RETRYING, State.SCHEDULED})


class Loop:
    """One worker's life after registration. Touches the tables only through `tick` and `look`."""

    def __init__(self, options: WorkerOptions, identity: Identity, waiting: Waiting) -> None:
        self.options = options
        self.identity = identity
        self.waiting = waiting
        self.database = Database(self._reopened)
        self.slots = Slots(options.concurrency, self.waiting.wake)
        self.leases = Leases()
        self.stats = Stats()
        self.dead = DeadSiblings()
        self.orders = Orders(identity.worker_id)
        self.timers = Timers()
        self.pace = Pace()
        self.maintenance = Maintenance()
        self.backends = None if options.backend is None else [options.backend]
        self.outcomes = Outcomes(self.slots.take_finished)
        self.listening = Listening(options, self.pace, self.timers)
        self.handing_over = False
        self.wanted_since: float | None = None
        self.careful = False
        self.hindrance = Hindrance()
        self.in_doubt = False
        self.stop_by: float | None = None
        self.stuck = StuckWatch()
        self.exit_code: int | None = None
        self.left = False
        self.claimed = 0

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

    def _started(self) -> bool:
        """Whether this worker is ready; the supervisor counts no time without the database."""
        self.waiting.hold_up(self.database.lost or self.wanted_since is not None)
        return not self.timers.recovering or self.stop_by is not None

    def _turn_until(self, over: Callable[[], bool]) -> None:
        while self.exit_code is None:
            try:
                if over():
                    return
                self._turn()
            except Error as error:  # of a read; a tick keeps its own
                self._failed(error, READ)

    def _turn(self) -> None:
        woken = self.waiting.wait(self._seconds_to_wait())
        self.handing_over = False
        if woken.drain or woken.quit:
            self._stop(at_once=woken.quit)
        self.timers.overslept(woken.late_seconds)
        self._keep_time_limits()  # before the first read, which may find the database locked
        self.listening.hear(woken)
        with self.database:
            if self.database.usable():
                self._work(woken)

    def _work(self, woken: Woken) -> None:
        if self.identity.has_come_back():
            self.timers.write_soon()
        try:
            self._read(woken)
        except Error as error:  # outcomes and renewals need not wait for what cannot be read
            self._failed(error, READ)
            if self.database.lost or self.exit_code is not None:
                return
        if self._has_work():
            self._tick()
        elif self.maintenance.due():
            self.maintenance.step()

    # -- waiting and listening

    def _seconds_to_wait(self) -> float:
        if self.database.lost:
            return self.database.retry_in()
        if self._wants_tick() or self.listening.owes_glance:
            pause = HAND_OVER_SECONDS if self.handing_over else 0.0
            return max(pause, self.timers.retry_in())
        return self.timers.seconds_until(
            self.leases.next_event(time.monotonic()),
            self.maintenance.next_at,
            self.stop_by,
            self.stuck.given_up_at,
            dirty=self.stats.dirty,
        )

    def _read(self, woken: Woken) -> None:
        """Look, glance or probe, as the bell, the supervisor and the timers ask for."""
        if self.listening.read(may_claim_at_once=self._may_claim_at_once()):
            self._check_leases()
        if woken.look or self.timers.probe_due():
            self._probe()
            if self.hindrance:
                self._passed(READ)

    def _may_claim_at_once(self) -> bool:
        """Whether a ring can be answered by a claim: with nothing else to be told, and cheaply."""
        # Jobs of other backends have no index of their own to be passed over by.
        nothing_else = not self.slots.running and not self.outcomes.wait
        return nothing_else and self.backends is None and self._may_claim() > 0

    def _check_leases(self) -> None:
        if self.in_doubt:
            known = self.leases.ids() | self.slots.running.keys()
            self.outcomes.disown(looks.leases_of(self.identity.worker_id), known)
            self.in_doubt = False
        held = self.leases.ids()
        for lease_id in held - looks.open_leases(held):
            self._lose(lease_id, "the job was cancelled, or another ended its lease")

    def _reopened(self) -> None:
        """What was told last may have been committed; and others may have lost their sessions."""
        self.outcomes.doubt()
        self.in_doubt = True
        self.dead.doubt()
        self.timers.look_soon()

    def _probe(self) -> None:
        """See who has died, and when the next lease ends: others claim without ringing us."""
        self.timers.probed()
        self.timers.plan(*looks.next_times())
        self.dead.find(conf.get().database, self.identity.worker_id)
        if self.dead.suspects:
            self.timers.probe_in(CONFIRM_SECONDS)
        if self.orders.read():
            self._obey()

    def _obey(self) -> None:
        if self.orders.stop:
            self.waiting.say(DISMISSED)  # before the end, which looks like any other
            self._stop(at_once=False)
        self.pace.more = True  # whoever is no longer quiet has claims to catch up with

    # -- the tick

    def _has_work(self) -> bool:
        return self._wants_tick() and self.timers.retry_in() == 0

    def _wants_tick(self) -> bool:
        return bool(
            self.slots.has_finished
            or self.outcomes.wait
            or self.timers.due
            or self.timers.recovering
            or self.dead.probes
            or self._places() > 0
            or self.timers.write_due(self.stats.dirty)
            or self.leases.to_renew(time.monotonic())
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

    def _plan(self, now: float, waited_seconds: float) -> Plan:
        return Plan(
            worker_id=self.identity.worker_id,
            settlements=self._settlements,
            places=self._places,
            queues=self.pace.ring(self.listening.queues),
            backends=self.backends,
            lease_seconds=self.options.lease_seconds,
            suspects=max(0, 1 - self.leases.suspects()),
            renew=self.leases.to_renew(now),
            due=self.timers.due or self.timers.recovering,
            may_expire=self.timers.may_recover(waited_seconds),
            dead=self.dead,
            stats=self.stats if self.timers.write_due(self.stats.dirty) else None,
            hindrance=self.hindrance.reason,
            careful=self.careful,
            overdrawn=self._overdrawn,
        )

    def _settlements(self) -> Sequence[Settlement]:
        self.waiting.forget_wakes()
        return self.outcomes.collect()

    def _overdrawn(self) -> tuple[Sequence[Held], float]:
        """Return the leases that ran out while we waited for the writer, and for how long we do."""
        now = time.monotonic()
        own = {f.settlement.lease_id: f for f in self.outcomes.finished}
        waits = [(h, self._waits_since(own.get(h.claim.lease_id))) for h in self.leases.gone(now)]
        overdrawn = [(held, since) for held, since in waits if since < held.until]
        waited = now - min((since for _, since in overdrawn), default=now)
        return [held for held, _ in overdrawn], waited

    def _waits_since(self, own: Finished | None) -> float:
        """Return since when we have wanted to write of a lease; infinity if we do not."""
        returned_at = inf if own is None else own.returned_at
        return min(returned_at, inf if self.wanted_since is None else self.wanted_since)

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
        self.wanted_since, self.careful = None, bool(self.hindrance)
        steps = tried(plan, done) if done.faults or self.hindrance else set()
        self._apply(plan, done, began)
        if done.faults:
            self._hold(done.faults, claimed=bool(done.claims))
        if self.hindrance:
            self._passed(COMMIT, *(steps - done.faults.keys()))

    def _failed(self, error: Exception, step: str) -> None:
        """Nothing was committed, or nobody knows: keep every outcome, and act by the cause."""
        trouble = self.database.diagnose(error)
        if trouble == "lost":
            self.database.lose(error)
        elif trouble == "full":
            logger.error("No room for the database: %s. Claims stop; outcomes are kept.", error)
            self.timers.hold_claims(1.0)
        elif trouble in ("data", "tables") and not self.careful and step == COMMIT:
            why = in_one_line(error)
            logger.warning("Something cannot be stored or read: %s. One by one, then.", why)
            self.careful = True
            self.database.renew()
        elif trouble == "replaced":
            logger.critical("%s. The worker ends.", error)
            self.exit_code = EXIT_REPLACED
        elif trouble in ("data", "tables") and isinstance(error, store.UNREADABLE):
            self._hold({step: error})
        elif trouble != "busy":
            logger.critical("Nobody knows what was committed: %r. Exiting.", error, exc_info=error)
            self.exit_code = EXIT_UNKNOWN

    def _hold(self, faults: Mapping[str, Exception], *, claimed: bool = False) -> None:
        """No row is to blame: claim nothing for a while, keep what is to be told, and try on."""
        reason = self.hindrance.reason
        pause = self.hindrance.meet(faults)
        self.careful = True
        self.database.renew()
        if READ in faults:
            self.timers.look_in(pause)
        if NEEDED_TO_CLAIM.isdisjoint(faults) or claimed:
            self.timers.hold_ticks(pause)
        else:
            self.timers.hold_claims(pause)
        self.pace.more = True
        if reason != self.hindrance.reason:
            self.timers.write_soon()

    def _passed(self, *steps: str) -> None:
        reason = self.hindrance.reason
        self.hindrance.passed(steps)
        self.careful = bool(self.hindrance)
        if reason != self.hindrance.reason:
            self.timers.write_soon()

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
        self.leases.renewed(done.renewed, began)
        for lease_id in done.lost:
            self._lose(lease_id, "the lease had ended when it was to be renewed")
        if plan.dead.probes and PROBE not in done.faults:
            plan.dead.bury()
        self.timers.ticked(len(done.recovered) + done.promoted)
        self.stats.recovered(done.recovered, done.now)
        self.stats.claimed(done.claims, done.now)
        self.pace.learn(done.asked, done.claims)
        if done.asked and not done.claims and self.backends is not None:
            # Jobs of other backends have no index of their own to be passed over by.
            self.pace.rest(FRUITLESS_REST_SECONDS)
        if done.recovered or done.promoted:
            self._share_work()

    def _apply_answers(self, done: Done) -> None:
        answers, seconds = self.outcomes.committed(done.answers)
        self.stats.settled(answers, seconds, done.now)
        waits = room = False
        for answer in answers:
            held = self.leases.drop(answer.lease_id)
            if answer.reason:
                logger.warning("Lease %s was refused: %s.", answer.lease_id, answer.reason)
            waits = waits or answer.state in WAITING
            # Ready again is a job that was handed back.
            room = room or answer.queue in self.listening.limited or answer.state == State.READY
            # With this suspect gone another may be claimed.
            self.pace.more = self.pace.more or (held is not None and held.claim.suspect)
        if waits:
            self.timers.look_soon()
        if room:
            self._share_work()

    def _share_work(self) -> None:
        """There may be jobs, or room for them, that nobody has been told of."""
        self.pace.more = True
        self.database.ring()

    def _start(self, claims: Sequence[Claim], began: float) -> None:
        for claim in claims:
            context = JobContext.of(claim, self.identity.incarnation)
            self.leases.grant(claim, context, began)
            self.slots.start(claim, context)
        self.claimed += len(claims)
        self.handing_over = bool(claims)

    # -- time limits

    def _keep_time_limits(self) -> None:
        now = time.monotonic()
        overdue, gone = self.leases.overdue(now), self.leases.gone(now)
        if overdue or gone:
            # Taken first: a function is judged by when it returned, not by when somebody looks.
            own = self.outcomes.in_hand()
            self._end_overdue(overdue, own)
            self._end_gone(gone, own)
        if self.slots.running:  # what else holds the gate is for the supervisor to end
            exit_if_gate_is_hogged(self.slots.stuck_threads, self.outcomes.job_ids)

    def _end_overdue(self, overdue: Sequence[Held], own: Mapping[int, Finished]) -> None:
        for held in overdue:
            finished = own.get(held.claim.lease_id)
            if finished is None or not finished.in_time:
                self.outcomes.told.append(timed_out(held.claim))
                self._lose(held.claim.lease_id, TIMED_OUT)

    def _end_gone(self, gone: Sequence[Held], own: Mapping[int, Finished]) -> None:
        """Give up leases that ran out, but for those that we only could not write of.

        Those are ours for as long as nobody has ended them, which the next tick finds out. Their
        functions are told to stop all the same: another worker may have their jobs by now.
        """
        for held in gone:
            if self._waits_since(own.get(held.claim.lease_id)) < held.until:
                held.context.cancel("the lease ran out while the database was waited for")
            else:
                self._lose(held.claim.lease_id, "the lease ran out before it could be renewed")

    def _lose(self, lease_id: int, reason: str) -> None:
        """Our word on this lease counts no more; its slot is taken until the function returns."""
        held = self.leases.drop(lease_id)
        if held is not None:
            held.context.cancel(reason)
            self.slots.mark_stuck(lease_id)
            self.pace.more = self.pace.more or held.claim.suspect  # another suspect may come

    # -- the end

    def _stop(self, *, at_once: bool) -> None:
        if at_once or self.stop_by is None:
            patience_seconds = 0.0 if at_once else self.options.shutdown_timeout_seconds
            self.stop_by = time.monotonic() + patience_seconds

    def _over(self) -> bool:
        """Decide whether the life of this worker is over; sets the exit code."""
        # A job whose lease is over is nobody's any more, although its function goes on.
        at_work = len(self.slots.running) > self.slots.stuck
        idle = not at_work and self._nothing_in_hand()
        if self.stop_by is not None:
            if idle or time.monotonic() >= self.stop_by:
                self.exit_code = 0
        elif self._nothing_in_hand() and self.stuck.given_up(self.slots.stuck, self.slots.places):
            self.exit_code = EXIT_STUCK
        elif idle and self._nothing_left():
            self.exit_code = 0
        return self.exit_code is not None

    def _nothing_in_hand(self) -> bool:
        return not (self.slots.has_finished or self.outcomes.wait)

    def _nothing_left(self) -> bool:
        if self.options.max_jobs is not None and self.claimed >= self.options.max_jobs:
            return True
        busy = not self.options.drain or self.pace.more or self.timers.due
        if busy or not self.database.usable():
            return False
        return looks.busy_queues(self.backends).isdisjoint(
            self.options.served(self.listening.queues)
        )

    def _say_what_is_lost(self) -> None:
        """Name the jobs whose outcomes this process takes along: the database did not take them."""
        self.outcomes.in_hand()
        if jobs := self.outcomes.job_ids:
            logger.error(
                "The outcomes of %d jobs %s: %s. Those that were not are run again by another worker.",
                len(jobs),
                "may not have been written" if self.exit_code else "could not be written",
                shown_ids(jobs),
            )

    def _leave(self) -> None:
        """Hand back what is unfinished, uncharged, and mark the row as stopped.

        Sets ``left`` if all of that was committed.
        """
        self.stop_by = self.stop_by or time.monotonic()
        self.outcomes.hand_back(self.leases)
        give_up = time.monotonic() + LEAVE_SECONDS
        while self.outcomes.wait and self.exit_code == 0 and time.monotonic() < give_up:
            time.sleep(max(self.timers.retry_in(), self.database.retry_in()))
            with self.database:
                if self.database.usable():
                    self._tick()
        if not self.outcomes.wait:
            self.left = self.identity.sign_off(self.orders.stop_reason, LEAVE_SECONDS)
        self._share_work()
        self.dead.close()
        self.slots.close()
