"""Other users of the machine, for tests of rights: a forked child that has become one of them."""

import os
import traceback
import warnings
from collections.abc import Callable, Sequence

import pytest

MEMBER, OTHER_MEMBER, STRANGER = 60_001, 60_002, 60_003
"""Users that need no account."""
GROUP = 60_010
"""The group of the members, who share a database."""

only_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="RIGHTS OF OTHER USERS ARE NOT TESTED: only root can become another"
)


def become(user: int, groups: Sequence[int] = ()) -> None:
    """Give up root for good; the first of ``groups`` is the primary one, else the user's own."""
    os.setgroups(list(groups))
    primary = groups[0] if groups else user
    os.setresgid(primary, primary, primary)
    os.setresuid(user, user, user)


def succeeds_as(user: int, work: Callable[[], object], groups: Sequence[int] = ()) -> bool:
    """Say whether ``work`` ends without an exception in a child that is ``user``; 0 stays root."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if user:
                become(user, groups)
            warnings.simplefilter("error", RuntimeWarning)
            work()
            code = 0
        except BaseException:  # the parent asserts, and the output says why
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
