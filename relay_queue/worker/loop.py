"""The loop of a worker process: wait, look, tick, start. It alone talks to the queue's tables.

Slots run functions; the loop owns the connection, the leases and the time limits. It never waits
for the database longer than a slice, so limits and orders are kept while others hold the writer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from django.db import DatabaseError, connections

from relay_queue import clock, conf, store, wakeup
from relay_queue.states import State
from relay_queue.store.dialects import dialect_for
from relay_queue.store.records import Claim, Settlement
from relay_queue.worker.context import TIMED_OUT, JobContext
from relay_queue.worker.executor import Finished
from relay_queue.worker.held import Leases
from relay_queue.worker.identity import Identity
from relay_queue.worker.maintenance import Maintenance
from relay_queue.worker.options import DISMISSED, READY, WorkerOptions
from relay_queue.worker.orders import Orders
from relay_queue.worker.pace import Pace
from relay_queue.worker.siblings import DeadSiblings
from relay_queue.worker.slots import Slots
from relay_queue.worker.stats import Stats
from relay_queue.worker.tick import Done, Plan, tick
from relay_queue.worker.timers import Timers
from relay_queue.worker.waiting import Waiting, Woken
from relay_queue.worker.watch import StuckWatch, exit_if_gate_is_hogged
from relay_queue.worker.words import released, said_better, timed_out

logger = logging.getLogger("relay_queue.worker")

EXIT_UNKNOWN = 70
"""Exit code after an error that leaves the outcome of a commit unknown."""

EXIT_STUCK = 71
"""Exit code when every slot is held by a function that does not end."""

FRUITLESS_REST_SECONDS = 1.0
"""Pause after a claim for some backends only that found nothing."""

LEAVE_SECONDS = 10.0
"""How long a worker tries to write its last outcomes before it leaves them to recovery. Less than
the supervisor's patience after QUIT."""

WAITING = frozenset({State.RETRYING, State.SCHEDULED})


class Loop:
    """One worker's life after registration. Touches the tables only through `tick` and `look`."""

    def __init__(self, options: WorkerOptions, identity: Identity, waiting: Waiting) -> None:
        self.options = options
        self.identity = identity
        self.waiting = waiting
        self.slots = Slots(options.concurrency, self.waiting.wake)
        self.leases = Leases()
        self.stats = Stats()
        self.dead = DeadSiblings()
        self.orders = Orders(identity.worker_id)
        self.timers = Timers()
        self.pace = Pace()
        self.maintenance = Maintenance()
        self.backends = None if options.backend is None else [options.backend]
        self.told: list[Settlement] = []
        self.finished: list[Finished] = []
        self.rung = False
        self.known: set[str] = set()
        self.queues: list[str] = []
        self.limited: set[str] = set()
        self.wanted_since: float | None = None
        self.careful = False
        self.stop_by: float | None = None
        self.stuck = StuckWatch(options.concurrency)
        self.exit_code: int | None = None
        self.left = False
        self.claimed = 0

    def run(self) -> int:
        """Recover, say READY, serve until told to stop, hand back what is left."""
        self._turn_until(lambda: not self.timers.recovering or self.stop_by is not None)
        if self.exit_code is None:
            self.waiting.say(READY)
        self._turn_until(self._over)
        if self.exit_code == 0:
            self._leave()
        self.waiting.close()
        return self.exit_code or 0

    def _turn_until(self, over: Callable[[], bool]) -> None:
        while self.exit_code is None:
            try:
                if over():
                    return
                self._turn()
            except DatabaseError as error:  # of a look; a tick keeps its own
                self._failed(error)

    def _turn(self) -> None:
        woken = self.waiting.wait(self._seconds_to_wait())
        if woken.drain or woken.quit:
            self._stop(at_once=woken.quit)
        self.timers.overslept(woken.late_seconds)
        self._keep_time_limits()  # before the first read, which may find the database locked
        self._read(woken)
        if self._has_work():
            self._tick()
        elif self.maintenance.due():
            self.maintenance.step()
        connections[conf.get().database].queries_log.clear()  # it grows for ever under DEBUG

    # -- waiting and listening

    def _seconds_to_wait(self) -> float:
        if self._wants_tick():
            return self.timers.retry_in()
        return self.timers.seconds_until(
            self.leases.next_event(time.monotonic()),
            self.maintenance.next_at,
            self.stop_by,
            self.stuck.given_up_at,
            dirty=self.stats.dirty,
        )

    def _read(self, woken: Woken) -> None:
        """Look, glance or probe, as the bell, the supervisor and the timers ask for."""
        if woken.look:
            self.timers.look_soon()
        self.rung = self.rung or woken.rung  # kept: a look that fails must be tried again
        if self.timers.look_due():
            self._look()
        elif self.rung:
            self._glance()
        if woken.look or self.timers.probe_due():
            self._probe()

    def _glance(self) -> None:
        """What a ring can mean, in as few reads as possible: the way of a job to its function."""
        ready = store.inspect.ready_queues()
        if ready - self.known:
            self._look()  # a queue that was not there before
            return
        self.rung = False
        if not ready.isdisjoint(self.queues):
            self.pace.more = True  # when the next job is due can wait for the next probe
        else:
            self.timers.plan(*store.inspect.next_times(), clock.now())
        self._check_leases()

    def _look(self) -> None:
        """A read without the gate: is there work for us, and are our leases still ours?"""
        found = store.inspect.look()
        self.rung = False
        self.timers.looked()
        self.timers.plan(found.next_due_at, found.next_expiry_at, clock.now())
        self.known, self.limited = set(found.queues), found.limited
        self.queues = self._own(found.queues)
        if not found.ready.isdisjoint(self.queues):
            self.pace.more = True
        self._check_leases()

    def _check_leases(self) -> None:
        held = self.leases.ids()
        for lease_id in held - store.inspect.open_leases(held):
            self._lose(lease_id, "the job was cancelled, or another ended its lease")

    def _probe(self) -> None:
        """See who has died, and when the next lease ends: others claim without ringing us."""
        self.timers.probed()
        self.timers.plan(*store.inspect.next_times(), clock.now())
        self.dead.find(self.identity.database_path, self.identity.worker_id)
        if self.orders.read():
            self._obey()

    def _obey(self) -> None:
        """Do what an operator has ordered since the last probe."""
        if self.orders.stop:
            self.waiting.say(DISMISSED)  # before the end, which looks like any other
            self._stop(at_once=False)
        self.pace.more = True  # whoever is no longer quiet has claims to catch up with

    def _own(self, queues: Iterable[str]) -> list[str]:
        """Return the queues that this worker serves, in the order that it was given."""
        if self.options.queues is not None:
            return list(self.options.queues)
        return [name for name in queues if name not in self.options.exclude_queues]

    # -- the tick

    def _has_work(self) -> bool:
        return self._wants_tick() and self.timers.retry_in() == 0

    def _wants_tick(self) -> bool:
        return bool(
            self.slots.has_finished
            or self.finished
            or self.told
            or self.timers.due
            or self.timers.recovering
            or self.dead.probes
            or self._places() > 0
            or self.timers.write_due(self.stats.dirty)
            or self.leases.to_renew(time.monotonic())
        )

    def _places(self) -> int:
        """How many jobs may be claimed now."""
        if self.stop_by is not None or self.orders.quiet or not self.timers.may_claim():
            return 0
        free = self.slots.free
        if self.options.max_jobs is not None:
            free = min(free, self.options.max_jobs - self.claimed)
        return self.pace.ask(free)

    def _plan(self, now: float, waited_seconds: float) -> Plan:
        return Plan(
            worker_id=self.identity.worker_id,
            settlements=self._settlements,
            places=self._places,
            queues=self.pace.ring(self.queues),
            backends=self.backends,
            lease_seconds=self.options.lease_seconds,
            suspects=max(0, 1 - self.leases.suspects()),
            renew=self.leases.to_renew(now),
            due=self.timers.due or self.timers.recovering,
            may_expire=self.timers.may_recover(waited_seconds),
            dead=self.dead,
            stats=self.stats if self.timers.write_due(self.stats.dirty) else None,
            careful=self.careful,
        )

    def _settlements(self) -> Sequence[Settlement]:
        """Collect what is to be settled; kept until a commit, whatever happens to this tick."""
        self.waiting.forget_wakes()
        self.finished += self.slots.take_finished()
        finished = {f.settlement.lease_id: f for f in self.finished}
        self.told = [told for told in self.told if not said_better(told, finished)]
        return self.told + [f.settlement for f in self.finished if f.settled is None]

    def _tick(self) -> None:
        began = time.monotonic()
        self.wanted_since = self.wanted_since or began
        plan = self._plan(began, began - self.wanted_since)
        try:
            done = tick(plan)
        except Exception as error:  # noqa: BLE001 - what an altered row makes us raise is open
            self._failed(error)
            return
        finally:
            self.timers.overslept(time.monotonic() - began)
        self.wanted_since, self.careful = None, False
        self._apply(plan, done, began)

    def _failed(self, error: Exception) -> None:
        """Nothing was committed, or nobody knows: keep every outcome, and act by the cause."""
        connection = connections[conf.get().database]
        dialect = dialect_for(connection)
        # What is not the database's error came before the commit, from data that was read.
        trouble = dialect.diagnose(error) if isinstance(error, DatabaseError) else "data"
        if trouble == "busy":
            return
        if trouble == "full":
            logger.error("No room for the database: %s. Claims stop; outcomes are kept.", error)
            self.timers.hold_claims(1.0)
        elif trouble == "data" and not self.careful:
            logger.warning("Something cannot be stored or read: %r. One by one, then.", error)
            self.careful = True
            dialect.read_anything(connection)
        else:
            logger.critical("Nobody knows what was committed: %r. Exiting.", error, exc_info=error)
            self.exit_code = EXIT_UNKNOWN

    def _apply(self, plan: Plan, done: Done, began: float) -> None:
        """Persist before apply: only what has been committed changes what we believe and run."""
        self._apply_answers(done)
        self._start(done.claims, began)
        self.leases.renewed(done.renewed, began)
        for lease_id in done.lost:
            self._lose(lease_id, "the lease had ended when it was to be renewed")
        if plan.dead.probes:
            plan.dead.bury()
        if plan.stats is not None:
            self.stats.written(done.now)
            self.timers.written()
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
        seconds = {f.settlement.lease_id: f.run_seconds for f in self.finished}
        answers = done.answers + [f.settled for f in self.finished if f.settled is not None]
        self.told, self.finished = [], []
        self.stats.settled(answers, seconds, done.now)
        waits = room = False
        for answer in answers:
            held = self.leases.drop(answer.lease_id)
            if answer.reason:
                logger.warning("Lease %s was refused: %s.", answer.lease_id, answer.reason)
            waits = waits or answer.state in WAITING
            room = room or answer.queue in self.limited
            # With this suspect gone another may be claimed.
            self.pace.more = self.pace.more or (held is not None and held.claim.suspect)
        if waits:
            self.timers.look_soon()
        if room:
            self._share_work()

    def _share_work(self) -> None:
        """There may be jobs, or room for them, that nobody has been told of."""
        self.pace.more = True
        if self.identity.database_path is not None:
            wakeup.ring(self.identity.database_path)

    def _start(self, claims: Sequence[Claim], began: float) -> None:
        for claim in claims:
            context = JobContext.of(claim, self.identity.incarnation)
            self.leases.grant(claim, context, began)
            self.slots.start(claim, context)
        self.claimed += len(claims)

    # -- time limits

    def _keep_time_limits(self) -> None:
        now = time.monotonic()
        for held in self.leases.overdue(now):
            self.told.append(timed_out(held.claim))
            self._lose(held.claim.lease_id, TIMED_OUT)
        for held in self.leases.gone(now):
            self._lose(held.claim.lease_id, "the lease ran out before it could be renewed")
        exit_if_gate_is_hogged(self.slots.stuck_threads)

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
        idle = not (at_work or self.slots.has_finished or self.finished or self.told)
        if self.stop_by is not None:
            if idle or time.monotonic() >= self.stop_by:
                self.exit_code = 0
        elif not self.told and self.stuck.given_up(self.slots.stuck):
            logger.error("Every slot is held by a function that does not end. Exiting.")
            self.exit_code = EXIT_STUCK
        elif idle and self._nothing_left():
            self.exit_code = 0
        return self.exit_code is not None

    def _nothing_left(self) -> bool:
        if self.options.max_jobs is not None and self.claimed >= self.options.max_jobs:
            return True
        if not self.options.drain or self.pace.more or self.timers.due:
            return False
        return store.inspect.busy_queues(self.backends).isdisjoint(self._own(self.queues))

    def _leave(self) -> None:
        """Hand back what is unfinished, uncharged, and mark the row as stopped.

        Sets ``left`` if all of that was committed.
        """
        self.stop_by = self.stop_by or time.monotonic()
        self.finished += self.slots.take_finished()
        done = {f.settlement.lease_id for f in self.finished}
        for held in self.leases:
            if held.claim.lease_id not in done:
                self.told.append(released(held.claim))
                held.context.cancel("the worker is stopping")
        give_up = time.monotonic() + LEAVE_SECONDS
        while (self.told or self.finished) and self.exit_code == 0 and time.monotonic() < give_up:
            time.sleep(self.timers.retry_in())
            self._tick()
        if not (self.told or self.finished):
            self.left = self.identity.sign_off(self.orders.stop_reason, LEAVE_SECONDS)
        self._share_work()
        self.dead.close()
        self.slots.close()
