"""Real processes that live, stop and die, and what a probe can prove about them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from relay_queue.worker import liveness
from relay_queue.worker.liveness import (
    NO_LOCK,
    Liveness,
    LivenessLock,
    LockIdentity,
    boot_id,
    probe,
)
from tests.conftest import wait_until

NAME = "3f2a9c0d" * 4


class Worker:
    """A forked process that holds a liveness lock, like a worker does."""

    def __init__(self, database: Path, name: str, work: Callable[[LivenessLock], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(reading)
                lock = LivenessLock.hold(str(database), name)
                os.write(writing, f"{lock.identity.device} {lock.identity.inode}".encode())
                os.close(writing)
                work(lock)
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            device, inode = pipe.read().split()
        self.identity = LockIdentity(int(device), int(inode))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill and reap it, if that was not done yet."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


Start = Callable[..., Worker]


def sleep_for_long(_: LivenessLock) -> None:
    time.sleep(600)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "some.sqlite3"
    path.touch(0o640)
    return path


@pytest.fixture
def start(database: Path) -> Iterator[Start]:
    workers: list[Worker] = []

    def start(name: str = NAME, work: Callable[[LivenessLock], None] = sleep_for_long) -> Worker:
        workers.append(Worker(database, name, work))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def verdict(database: Path, identity: LockIdentity, name: str = NAME) -> Liveness:
    with probe(str(database), name, identity) as found:
        return found.verdict


def test_a_running_worker_is_alive_and_a_killed_one_is_dead_at_once(
    database: Path, start: Start
) -> None:
    worker = start()
    assert verdict(database, worker.identity) is Liveness.ALIVE
    worker.signal(signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    # Dead before its parent has reaped it.
    assert verdict(database, worker.identity) is Liveness.DEAD


def test_a_stopped_worker_is_alive(database: Path, start: Start) -> None:
    worker = start()
    worker.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
    assert verdict(database, worker.identity) is Liveness.ALIVE


def test_a_holder_is_alive_to_its_own_process(database: Path) -> None:
    lock = LivenessLock.hold(str(database), NAME)
    assert verdict(database, lock.identity) is Liveness.ALIVE
    # The probe closed its descriptor, which must not have dropped the lock.
    assert verdict(database, lock.identity) is Liveness.ALIVE
    lock.release()


def test_a_clean_stop_leaves_no_file_and_proves_nothing(database: Path) -> None:
    lock = LivenessLock.hold(str(database), NAME)
    lock.release()
    lock.release()
    assert os.listdir(f"{database}-workers") == []
    assert verdict(database, lock.identity) is Liveness.UNKNOWN


def test_a_name_is_held_only_once(database: Path) -> None:
    lock = LivenessLock.hold(str(database), NAME)
    with pytest.raises(FileExistsError):
        LivenessLock.hold(str(database), NAME)
    assert verdict(database, lock.identity) is Liveness.ALIVE
    lock.release()


def fork_a_child_that_outlives(_: LivenessLock) -> None:
    if os.fork() == 0:
        os.setsid()
    time.sleep(600)


def start_a_program_that_outlives(_: LivenessLock) -> None:
    # close_fds=False is the harder case: only close-on-exec keeps the lock from the program.
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(command, close_fds=False, start_new_session=True)
    time.sleep(600)


@pytest.mark.parametrize("work", [fork_a_child_that_outlives, start_a_program_that_outlives])
def test_a_child_left_by_a_job_does_not_keep_its_dead_parent_alive(
    database: Path, start: Start, work: Callable[[LivenessLock], None]
) -> None:
    worker = start(work=work)
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    child = int(wait_until(lambda: children.read_text().split())[0])
    try:
        # The child lives and has run its fork handlers or its exec once it leads a session.
        wait_until(lambda: os.getsid(child) == child)
        assert verdict(database, worker.identity) is Liveness.ALIVE
        worker.end()
        # A program closes the lock at exec, just after it became the leader of its session.
        wait_until(lambda: verdict(database, worker.identity) is Liveness.DEAD)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_closes_and_releases_leaves_its_parents_lock_alone(database: Path) -> None:
    lock = LivenessLock.hold(str(database), NAME)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(lock.path).exists()
    assert verdict(database, lock.identity) is Liveness.ALIVE
    lock.release()


def test_another_file_under_the_same_name_proves_nothing(database: Path, start: Start) -> None:
    worker = start()
    worker.end()
    path = Path(f"{database}-workers", NAME)
    copy = path.with_name("copy")
    copy.touch()
    copy.rename(path)
    assert verdict(database, worker.identity) is Liveness.UNKNOWN
    assert path.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_something_else_under_the_same_name_proves_nothing(
    database: Path, start: Start, kind: str
) -> None:
    worker = start()
    worker.end()
    path = Path(f"{database}-workers", NAME)
    # The old file stays, so that its inode is not given to the new one.
    moved = path.rename(path.with_name("moved"))
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert verdict(database, worker.identity) is Liveness.UNKNOWN


def test_a_missing_file_proves_nothing_and_probing_creates_none(
    database: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert verdict(database, LockIdentity(1, 2)) is Liveness.UNKNOWN
    assert verdict(database, NO_LOCK) is Liveness.UNKNOWN
    assert sorted(tmp_path.rglob("*")) == before


def test_only_one_of_two_probers_gets_the_dead_worker(database: Path, start: Start) -> None:
    worker = start()
    worker.end()
    first = probe(str(database), NAME, worker.identity)
    assert first.verdict is Liveness.DEAD
    second = probe(str(database), NAME, worker.identity)
    assert second.verdict is Liveness.ALIVE
    with pytest.raises(ValueError, match="'alive'"):
        second.remove()
    # The first could not commit: the next one must be able to prove the death again.
    first.close()
    with probe(str(database), NAME, worker.identity) as third:
        assert third.verdict is Liveness.DEAD


def test_a_forked_child_of_a_prober_does_not_keep_the_dead_workers_lock(
    database: Path, start: Start
) -> None:
    worker = start()
    worker.end()
    found = probe(str(database), NAME, worker.identity)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    found.close()
    try:
        # The child closes its copy as the first thing it does, but it must get to run.
        wait_until(lambda: verdict(database, worker.identity) is Liveness.DEAD)
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_buried_worker_is_not_declared_dead_again(
    database: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    worker.end()
    found = probe(str(database), NAME, worker.identity)

    def remove_while_the_other_prober_is_between_open_and_lock(self: object) -> bool:
        monkeypatch.undo()
        found.remove()
        found.close()
        return self.lock()  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(
        liveness._Descriptor, "lock", remove_while_the_other_prober_is_between_open_and_lock
    )
    assert verdict(database, worker.identity) is Liveness.UNKNOWN
    assert not Path(found.path).exists()
    with pytest.raises(ValueError, match="closed"):
        found.remove()


def test_burying_leaves_a_file_that_took_the_name_meanwhile(database: Path, start: Start) -> None:
    worker = start()
    worker.end()
    with probe(str(database), NAME, worker.identity) as found:
        Path(found.path).unlink()
        Path(found.path).touch()
        found.remove()
        assert Path(found.path).exists()


def test_without_locks_on_this_system_everything_is_unknown(
    database: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    worker.end()
    monkeypatch.setattr(liveness, "fcntl", None)
    assert verdict(database, worker.identity) is Liveness.UNKNOWN
    lock = LivenessLock.hold(str(database), "other")
    assert lock.identity == NO_LOCK
    assert not Path(lock.path).exists()
    lock.release()


def test_the_file_and_its_directory_belong_to_those_who_can_write_the_database(
    database: Path,
) -> None:
    database.chmod(0o664)
    lock = LivenessLock.hold(str(database), NAME)
    assert os.stat(lock.path).st_mode & 0o777 == 0o660
    assert os.stat(os.path.dirname(lock.path)).st_mode & 0o777 == 0o770
    lock.release()


@pytest.mark.parametrize("altered", ["../some.sqlite3", "a" * 31, "\0" * 32, "A" * 32, ""])
def test_a_row_that_names_no_incarnation_names_no_file(database: Path, altered: str) -> None:
    database.touch()
    status = database.stat()
    with probe(str(database), altered, LockIdentity(status.st_dev, status.st_ino)) as found:
        assert (found.verdict, found.path) == (Liveness.UNKNOWN, "")
    assert database.exists()


def test_a_lock_is_found_through_a_link_to_the_database(database: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite3"
    link.symlink_to(database)
    lock = LivenessLock.hold(str(link), NAME)
    assert verdict(database, lock.identity) is Liveness.ALIVE
    lock.release()


def test_an_identity_fits_a_signed_column_of_64_bits() -> None:
    values = [0o100600, 2**64 - 1, 2**64 - 2, 1, 0, 0, 0, 0, 0, 0]
    assert LockIdentity.of(os.stat_result(values)) == LockIdentity(2**63 - 2, 2**63 - 1)


def test_the_boot_id_stays_the_same_and_has_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert boot_id() == boot_id() != ""
    monkeypatch.setattr(liveness, "BOOT_ID_PATH", "/nowhere/boot_id")
    assert boot_id() != ""
