"""Texts that callers and functions wrote, as a viewer may see them: errors and tracebacks in here.

Whoever may not view arguments may not view these either: a message of an error often has one in it.
The class of an exception is a name in the code and is shown with the attempt.
"""

from __future__ import annotations

from typing import Any, Final

from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from relay_queue import conf
from relay_queue.models import Job, Lease

ARGUMENTS: Final = "arguments"
RESULT: Final = "result"
ERROR: Final = "error"
TRACEBACK: Final = "traceback"


def last_error(job: Job, newest: Any | None, *, may_see: bool) -> str:
    """Return the last error of a job; the class alone for those who may not see its message.

    ``newest`` is the lease that tells the class, None if the viewer may not see it.
    """
    if not job.last_error:
        return ""
    if may_see:
        return formatted(ERROR, job.task, job.last_error)
    path = "" if newest is None else str(newest.error)
    return path.rpartition(".")[2] or hidden()


def traceback(lease: Lease, *, may_see: bool) -> str:
    """Return the traceback of an attempt; nothing if there is none."""
    if not lease.traceback:
        return ""
    return formatted(TRACEBACK, lease.job.task, lease.traceback) if may_see else hidden()


def formatted(kind: str, task: str, value: Any) -> str:
    """Return what the project's own function makes of a value; without one, the value, a text.

    An error in it is shown in place of the value, by its class alone: its message may have in it what
    the function is there to hide.
    """
    path = conf.get().formatter
    if path is None:
        return str(value)
    try:
        shown = import_string(path)(kind, task, value)
        if not isinstance(shown, str):
            raise TypeError
    except Exception as error:  # noqa: BLE001 - code of the project, and a page must not break by it
        name = type(error).__name__
        return _("(not shown: RELAY['FORMATTER'], %(path)s, raised %(name)s)") % {
            "path": path,
            "name": name,
        }
    return shown


def hidden() -> str:
    """Return what stands in the place of what may not be seen."""
    return _("(hidden)")
