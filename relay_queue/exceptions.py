"""Every error that Relay raises on purpose.

Messages name the value, the limit and the way out. Nothing is written when one of these is raised
by an enqueue or an operator verb.
"""

from __future__ import annotations

from collections.abc import Sequence


def shown(value: object) -> str:
    """Return a short spelling of a value, which may be an integer too long to print."""
    try:
        text = repr(value)
    except ValueError:
        return f"an integer of {int(value).bit_length()} bits"  # type: ignore[call-overload]
    return text if len(text) <= 80 else f"{text[:80]}…"


class RelayError(Exception):
    """Base class of all errors that Relay raises."""


class ConfigurationError(RelayError):
    """``settings.RELAY`` or the arguments of a command do not make sense."""


class InvalidJob(RelayError, ValueError):
    """An enqueue was refused because a value is out of its bounds. Nothing was written."""


class PayloadError(InvalidJob, TypeError):
    """The arguments do not fit the function, are no JSON, or are too large or too deep.

    A ``TypeError`` too: that is what Python and the task framework raise for such arguments.

    ``path`` says where, in the spelling of Python: ``kwargs['users'][3]``.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class ResultError(PayloadError):
    """What a function returned cannot be stored as JSON, or is too large or too deep.

    It is fatal: the function has done its work, and would do it again. Only a task whose ``retry_on``
    names this class or `PayloadError` is tried again.
    """


class UnknownQueue(InvalidJob):
    """The queue is not one of those that ``RELAY["QUEUES"]`` lists."""


class UnknownTask(InvalidJob):
    """The dotted path does not lead to a task that a configured Relay backend owns."""


class QueueFull(RelayError):
    """The queue already holds as many unfinished jobs as its capacity admits."""

    def __init__(self, queue: str, capacity: int, wanted: int = 1) -> None:
        self.queue = queue
        self.capacity = capacity
        self.wanted = wanted
        super().__init__(
            f"queue {queue!r} is full: it admits {capacity} unfinished jobs and has no room for "
            f"{wanted} more. Wait with wait_seconds=, enqueue later, or raise its capacity."
        )


class QueueInUse(RelayError):
    """The queue cannot be deleted: it has jobs, finished ones included.

    ``queue`` is its name, and ``jobs`` counts them by state.
    """

    def __init__(self, queue: str, jobs: dict[str, int]) -> None:
        self.queue = queue
        self.jobs = jobs
        found = ", ".join(f"{n:,} {state}" for state, n in jobs.items())
        super().__init__(
            f"queue {queue!r} is not empty: it has {found or 'jobs'}. Let it drain, cancel or discard "
            "what is left, and prune what has finished."
        )


class IdempotencyConflict(RelayError):
    """The key is taken in this queue by a job with another task or another payload.

    ``job_id`` is None when that job is another one of the same batch.
    """

    def __init__(self, queue: str, key: str, job_id: int | None = None) -> None:
        self.queue = queue
        self.key = key
        self.job_id = job_id
        holder = "another job of this batch" if job_id is None else f"job {job_id}"
        super().__init__(
            f"idempotency key {key!r} of queue {queue!r} belongs to {holder}, which has another "
            "task or other arguments. Use another key, or wait until that job is pruned."
        )


class InvalidTransition(RelayError):
    """An operation does not apply to a job in the state it is in. Nothing was changed.

    ``to_state`` is where the operation would have taken the job; None if it leaves states as they are.
    """

    def __init__(
        self,
        job_id: int,
        from_state: str,
        to_state: str | None,
        *,
        operation: str,
        states: Sequence[str],
    ) -> None:
        self.job_id = job_id
        self.from_state = str(from_state)
        self.to_state = None if to_state is None else str(to_state)
        *some, last = map(str, states)
        admitted = f"{', '.join(some)} or {last}" if some else last
        super().__init__(
            f"job {shown(job_id)} is {self.from_state}; {operation} is only for jobs that are "
            f"{admitted}. Nothing was changed."
        )


class JobNotFound(RelayError, LookupError):
    """There is no job with this id: it never existed, or it was pruned or discarded."""

    def __init__(self, job_id: object, why: str = "it may have been pruned or discarded") -> None:
        self.job_id = job_id
        super().__init__(f"there is no job {shown(job_id)}; {why}")


class WaitTimeout(RelayError, TimeoutError):
    """The job has not finished in the time that was given to wait for it. It goes on as it was."""

    def __init__(self, job_id: int, state: str, timeout_seconds: float) -> None:
        self.job_id = job_id
        self.state = state
        self.timeout_seconds = timeout_seconds
        super().__init__(
            f"job {job_id} is still {state} after {_in_seconds(timeout_seconds)}. Wait longer with "
            "timeout_seconds=, or look again later; is a worker running that serves its queue?"
        )


class Fatal(RelayError):
    """Raise it in a task function to send the job to the dead letters at once."""


class Retry(RelayError):
    """Raise it in a task function to fail this attempt and choose the delay of the next one.

    ``after_seconds`` replaces the back-off of this attempt; the attempt is charged as usual.
    """

    def __init__(self, message: str = "", *, after_seconds: float) -> None:
        super().__init__(message or f"retry after {_in_seconds(after_seconds)}")
        self.after_seconds = after_seconds


class Snooze(RelayError):
    """Raise it in a task function to run the job again in ``seconds``, uncharged."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"snooze for {_in_seconds(seconds)}")
        self.seconds = seconds


class Cancelled(RelayError):
    """The job was cancelled, its time ran out, or its lease was lost while it ran."""


class TimedOut(RelayError):
    """The attempt went past its ``timeout_seconds``."""


class Lost(RelayError):
    """The worker died, or fell silent until the lease had ended. What the function did is not known."""


class Unstorable(RelayError):
    """The outcome of a job could not be written for a reason that lies in its data."""


def _in_seconds(value: float) -> str:
    try:
        return f"{value:g} s"
    except (OverflowError, TypeError, ValueError):  # the worker refuses it as a delay
        return shown(value)


class InvalidSchedule(RelayError, ValueError):
    """A schedule, or its timing, does not make sense. Nothing was changed."""
