"""The path of a job through the states, as far as its leases record it, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from relay_queue.models import Job, Lease
from relay_queue.states import TRANSITIONS, Outcome, State

_AFTER: Final[dict[str, State]] = {
    Outcome.ACKED: State.SUCCEEDED,
    Outcome.FAILED: State.RETRYING,
    Outcome.TIMED_OUT: State.RETRYING,
    Outcome.FATAL: State.DEAD,
    Outcome.EXPIRED: State.READY,
    Outcome.LOST: State.READY,
    Outcome.RELEASED: State.READY,
    Outcome.UNRUN: State.READY,
    Outcome.SNOOZED: State.SCHEDULED,
    Outcome.CANCELLED: State.CANCELLED,
}
"""The state after each attempt but the last, after which the job itself has the state."""

_CHARGED_ENDS: Final = frozenset({Outcome.FAILED, Outcome.TIMED_OUT, Outcome.EXPIRED, Outcome.LOST})


def taken(job: Job, leases: Sequence[Lease]) -> list[State]:
    """Return the states of a job, oldest first, from all its leases in the order of id.

    A state that leaves no trace, such as the wait for its first due time, is missing.
    """
    path: list[State] = []
    if not leases and job.state == State.SCHEDULED:
        return [State.SCHEDULED]
    _append(path, State.READY)
    for place, lease in enumerate(leases):
        _append(path, State.READY)
        _append(path, State.RUNNING)
        if lease.outcome is None:
            continue
        is_last = place == len(leases) - 1
        _append(
            path, _after_last(job, lease) if is_last else _AFTER.get(lease.outcome, State.READY)
        )
    if job.state in State.values:
        _append(path, State(job.state))
    return path


def _after_last(job: Job, lease: Lease) -> State:
    """Return the state after the newest attempt: that of the job, unless it has changed since."""
    usual = _AFTER.get(lease.outcome or "", State.READY)
    if lease.outcome in _CHARGED_ENDS:
        if job.state in {State.DEAD, State.RETRYING}:
            return State(job.state)
        if job.attempt == job.attempt_base:  # requeued: it had been dead
            return State.DEAD
    return usual


def _append(path: list[State], state: State) -> None:
    """Append a state, and before it the state between if no transition leads to it directly."""
    if path and path[-1] == state:
        return
    if path and state not in TRANSITIONS[path[-1]]:
        between = next(
            (s for s in State if s in TRANSITIONS[path[-1]] and state in TRANSITIONS[s]), None
        )
        if between is not None:
            path.append(between)
    path.append(state)


class Node(NamedTuple):
    """A state in the picture: its place, and whether the job has been or is in it."""

    state: str
    label: str
    x: int
    y: int
    been: bool
    here: bool


class Edge(NamedTuple):
    """A transition in the picture: its line, and how often the job took it."""

    path: str
    times: int


WIDTH: Final = 106
HEIGHT: Final = 30
_PLACES: Final[dict[State, tuple[int, int]]] = {
    State.SCHEDULED: (150, 35),
    State.READY: (150, 115),
    State.RUNNING: (370, 115),
    State.RETRYING: (260, 195),
    State.SUCCEEDED: (590, 35),
    State.DEAD: (590, 115),
    State.CANCELLED: (590, 195),
}
_ALWAYS: Final[dict[tuple[State, State], str]] = {
    (State.SCHEDULED, State.READY): "M150 50V97",
    (State.READY, State.RUNNING): "M203 115H314",
    (State.RUNNING, State.SUCCEEDED): "M423 107C480 95 480 40 534 36",
    (State.RUNNING, State.DEAD): "M423 115H534",
    (State.RUNNING, State.CANCELLED): "M423 123C480 135 480 190 534 194",
    (State.RUNNING, State.RETRYING): "M360 130C350 165 340 185 316 191",
    (State.RETRYING, State.READY): "M207 191C180 185 168 165 161 133",
}
_WHEN_TAKEN: Final[dict[tuple[State, State], str]] = {
    (State.RUNNING, State.READY): "M330 100C300 78 225 78 192 97",
    (State.RUNNING, State.SCHEDULED): "M370 100C365 55 290 36 207 35",
    (State.READY, State.CANCELLED): "M130 130C120 245 420 250 534 204",
    (State.READY, State.DEAD): "M190 100C260 60 460 65 534 107",
    (State.DEAD, State.READY): "M560 130C500 232 180 238 141 133",
    (State.CANCELLED, State.READY): "M565 210C480 252 150 250 135 133",
    (State.SCHEDULED, State.CANCELLED): "M97 35C20 80 60 262 552 213",
    (State.RETRYING, State.CANCELLED): "M313 197H534",
}


def nodes(path: Sequence[State], state: str) -> Iterator[Node]:
    """Yield the states of the picture."""
    for each, (x, y) in _PLACES.items():
        yield Node(each.value, str(each.label), x, y, each in path, each == state)


def edges(path: Sequence[State]) -> list[Edge]:
    """Return the transitions of the picture; those that the job took come last, on top."""
    steps = list(pairwise(path))
    times = {step: steps.count(step) for step in set(steps)}
    drawn = [Edge(line, times.get(step, 0)) for step, line in _ALWAYS.items()]
    drawn += [Edge(line, times[step]) for step, line in _WHEN_TAKEN.items() if step in times]
    return sorted(drawn, key=lambda edge: edge.times > 0)
