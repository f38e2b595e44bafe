"""Real sockets beside real database files: who hears a ring, and that ringing never hurts."""

import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from relay_queue.db.filename import database_path
from relay_queue.wakeup import Doorbell, doorbell, ring_on_commit
from relay_queue.wakeup.doorbell import ring
from tests.conftest import wait_until

NOBODY = 65534


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "some.sqlite3"
    path.touch(0o640)
    return path


@pytest.fixture
def bell(database: Path) -> Iterator[Doorbell]:
    with closing(Doorbell(str(database), "b1")) as bell:
        yield bell


def names_beside(database: Path) -> list[str]:
    return sorted(os.listdir(f"{database}-bells"))


def in_a_child(work: Callable[[], bool]) -> bool:
    """Return what `work` returned in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- Ringing -----------------------------------------------------------------


def test_a_ring_makes_every_bell_readable_until_it_is_cleared(
    database: Path, bell: Doorbell
) -> None:
    with (
        closing(Doorbell(str(database), "b2")) as other,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(bell, selectors.EVENT_READ)
        selector.register(other, selectors.EVENT_READ)
        assert selector.select(0) == []
        assert ring(str(database)) == 2
        assert {key.fileobj for key, _ in selector.select(5)} == {bell, other}
        assert (bell.clear(), other.clear()) == (1, 1)
        assert selector.select(0) == []


def test_rings_coalesce_and_a_full_bell_delays_nobody(database: Path, bell: Doorbell) -> None:
    rung = sum(ring(str(database)) for _ in range(2_000))
    assert 1 <= rung < 2_000
    assert bell.clear() == rung
    assert bell.clear() == 0
    assert ring(str(database)) == 1


def test_clearing_ends_although_the_rings_do_not(
    database: Path, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "MOST_RINGS_PER_CLEAR", 3)
    for _ in range(5):
        ring(str(database))
    assert (bell.clear(), bell.clear()) == (3, 2)


def test_another_process_wakes_a_waiting_one(database: Path, bell: Doorbell) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(bell, selectors.EVENT_READ)
        source = (
            "import django; django.setup(); from relay_queue.wakeup.doorbell import ring; "
            f"assert ring({str(database)!r}) == 1"
        )
        subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
        assert selector.select(30)
    assert bell.clear() == 1


def test_many_threads_ring_at_once(database: Path, bell: Doorbell) -> None:
    heard = 0
    rung: list[int] = []
    threads = [
        threading.Thread(target=lambda: rung.extend(ring(str(database)) for _ in range(100)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        heard += bell.clear()
    heard += bell.clear()
    assert len(rung) == 800
    assert heard == sum(rung)


# --- Where the bells hang ----------------------------------------------------


@pytest.mark.usefixtures("files_stay_open")
@pytest.mark.parametrize("open_files", [doorbell.OPEN_FILES, "/nowhere"])
@pytest.mark.parametrize("name", ["with some spaces", "Prüfung-日本", "long-" * 40])
def test_any_path_to_the_database_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, open_files: str
) -> None:
    monkeypatch.setattr(doorbell, "OPEN_FILES", open_files)
    database = tmp_path / name / "some.sqlite3"
    database.parent.mkdir()
    database.touch()
    descriptors = len(os.listdir("/proc/self/fd"))
    with closing(Doorbell(str(database), "b" * 32)) as bell:
        assert ring(str(database)) == 1
        assert bell.clear() == 1
        assert names_beside(database) == ["b" * 32]
    assert names_beside(database) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_relative_paths_and_links_lead_to_the_same_bells(
    database: Path, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(database)
    monkeypatch.chdir(tmp_path)
    assert [ring("some.sqlite3"), ring("link"), ring(str(tmp_path / "link"))] == [1, 1, 1]
    with closing(Doorbell("link", "b2")):
        assert names_beside(database) == ["b1", "b2"]


def test_a_path_that_leads_to_another_database_later_rings_there(
    database: Path, bell: Doorbell, tmp_path: Path
) -> None:
    link = tmp_path / "current"
    link.symlink_to(database)
    assert ring(str(link)) == 1
    other = tmp_path / "other.sqlite3"
    other.touch()
    link.unlink()
    link.symlink_to(other)
    assert ring(str(link)) == 0
    with closing(Doorbell(str(other), "b2")) as other_bell:
        assert ring(str(link)) == 1
        assert (bell.clear(), other_bell.clear()) == (1, 1)


@pytest.mark.parametrize(
    ("database_mode", "socket_mode", "directory_mode"),
    [(0o600, 0o600, 0o700), (0o664, 0o660, 0o770), (0o666, 0o666, 0o777), (0o444, 0o600, 0o700)],
)
def test_whoever_can_write_the_database_can_ring(
    database: Path, database_mode: int, socket_mode: int, directory_mode: int
) -> None:
    database.chmod(database_mode)
    with closing(Doorbell(str(database), "b1")) as bell:
        found, directory = os.lstat(bell.path), os.stat(f"{database}-bells")
    assert stat.S_IMODE(found.st_mode) == socket_mode
    assert stat.S_IMODE(directory.st_mode) == directory_mode
    assert found.st_gid == directory.st_gid == database.stat().st_gid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
def test_bells_take_the_databases_owner_and_group_or_leave_the_group_out(database: Path) -> None:
    database.chmod(0o660)
    os.chown(database, NOBODY, 1)
    with closing(Doorbell(str(database), "b1")) as bell:
        found = os.lstat(bell.path)
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (NOBODY, 1, 0o660)

    def without_the_right() -> bool:
        os.chdir(public)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        bell = Doorbell("some.sqlite3", "b2")
        return stat.S_IMODE(os.lstat(f"some.sqlite3-bells/{bell.path[-2:]}").st_mode) == 0o600

    with tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o777)
        moved = Path(public, database.name)
        database.rename(moved)
        assert in_a_child(without_the_right)


# --- The dead ----------------------------------------------------------------


def test_a_dead_workers_bell_is_removed_by_the_next_ring(database: Path, bell: Doorbell) -> None:
    in_a_child(lambda: bool(Doorbell(str(database), "dead")))
    assert names_beside(database) == ["b1", "dead"]
    assert ring(str(database)) == 1
    assert names_beside(database) == ["b1"]


def test_a_stopped_workers_bell_stays(database: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        bell = Doorbell(str(database), "stopped")
        os.write(writing, b"!")
        signal.pause()
        bell.close()
        os._exit(0)
    try:
        os.read(reading, 1)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert sum(ring(str(database)) for _ in range(2_000)) >= 1
        assert names_beside(database) == ["stopped"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_only_dead_sockets_are_removed(database: Path, bell: Doorbell, tmp_path: Path) -> None:
    directory = Path(f"{database}-bells")
    (directory / "file").touch()
    (directory / "link").symlink_to(tmp_path / "gone")
    (directory / "subdirectory").mkdir()
    (directory / ".being-hung").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(directory / "stream"))
        stream.listen()
        before = names_beside(database)
        assert ring(str(database)) == 1
        assert names_beside(database) == before


def test_a_bell_answers_from_the_moment_its_name_is_seen(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[int] = []
    rename = os.rename

    def ring_around(source: str, target: str, **where: int) -> None:
        rung.append(ring(str(database)))
        rename(source, target, **where)
        rung.append(ring(str(database)))

    monkeypatch.setattr(os, "rename", ring_around)
    with closing(Doorbell(str(database), "b1")) as bell:
        assert rung == [0, 1]
        assert bell.clear() == 1


def test_closing_removes_the_own_socket_file_only(database: Path, bell: Doorbell) -> None:
    other = Doorbell(str(database), "b2")
    other.close()
    other.close()
    assert names_beside(database) == ["b1"]
    Path(bell.path).rename(f"{bell.path}-moved")
    Path(bell.path).touch()
    bell.close()
    assert names_beside(database) == ["b1", "b1-moved"]


def test_a_bell_that_cannot_be_hung_leaves_nothing_behind(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not here"):
        Doorbell(str(database), "b1")
    assert names_beside(database) == []


# --- Forks -------------------------------------------------------------------


def test_a_forked_child_loses_the_bell_and_its_parent_keeps_it(
    database: Path, bell: Doorbell
) -> None:
    def close_in_child() -> bool:
        lost = bell.fileno() == -1
        bell.close()
        return lost

    assert in_a_child(close_in_child)
    assert names_beside(database) == ["b1"]
    assert ring(str(database)) == 1
    assert bell.clear() == 1


def test_a_child_left_by_a_dead_worker_does_not_take_its_rings(database: Path) -> None:
    reading, writing = os.pipe()

    def die_with_a_child_left() -> bool:
        bell = Doorbell(str(database), "dead")
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        return bell.fileno() > 0

    assert in_a_child(die_with_a_child_left)
    try:
        wait_until(lambda: ring(str(database)) == 0)
        assert names_beside(database) == []
    finally:
        os.close(writing)
        os.close(reading)


def test_a_child_rings_its_parent_after_the_parent_has_rung(database: Path, bell: Doorbell) -> None:
    assert ring(str(database)) == 1
    assert in_a_child(lambda: ring(str(database)) == 1)
    assert bell.clear() == 2


# --- A ring never raises -----------------------------------------------------


@pytest.mark.parametrize(
    "path", ["", ":memory:", "/nowhere/some.sqlite3", "nul\0byte", "x" * 5_000, "\udc80\ud800"]
)
def test_a_ring_at_an_impossible_path_is_silent(path: str) -> None:
    assert ring(path) == 0


def test_a_ring_without_any_bells_is_silent(database: Path) -> None:
    assert ring(str(database)) == 0
    Path(f"{database}-bells").mkdir()
    assert ring(str(database)) == 0


def test_a_ring_where_the_directory_is_a_file_is_silent(database: Path) -> None:
    Path(f"{database}-bells").touch()
    assert ring(str(database)) == 0
    with pytest.raises(NotADirectoryError):
        Doorbell(str(database), "b1")


@pytest.mark.parametrize("locked", ["directory", "socket"])
def test_a_ring_without_permission_is_silent_and_removes_nothing(locked: str) -> None:
    def ring_as_nobody() -> bool:
        if os.geteuid() == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
        return ring(str(database)) == 0

    with tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o755)
        database = Path(public, "some.sqlite3")
        database.touch(0o644)
        with closing(Doorbell(str(database), "b1")) as bell:
            os.chmod(f"{database}-bells", 0 if locked == "directory" else 0o777)
            os.chmod(bell.path, 0 if locked == "socket" else 0o666)
            assert in_a_child(ring_as_nobody)
            os.chmod(f"{database}-bells", 0o700)
            assert names_beside(database) == ["b1"]


def test_a_ring_without_free_descriptors_is_silent(database: Path, bell: Doorbell) -> None:
    def ring_without_descriptors() -> bool:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        return ring(str(database)) == 0

    assert in_a_child(ring_without_descriptors)


def test_without_unix_sockets_a_ring_is_silent_and_a_bell_says_why(
    database: Path, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    assert ring(str(database)) == 0
    with pytest.raises(OSError, match="no Unix sockets"):
        Doorbell(str(database), "b2")


# --- Transactions ------------------------------------------------------------


@pytest.fixture
def alias(database: Path, django_db_blocker: Any) -> Iterator[str]:
    """Return the alias of a connection to the database that the bell hangs beside."""
    default = connections.databases["default"]
    engine = "django.db.backends.sqlite3"
    connections.databases["bells"] = {**default, "ENGINE": engine, "NAME": str(database)}
    with django_db_blocker.unblock():
        yield "bells"
        connections["bells"].close()
    del connections["bells"]
    del connections.databases["bells"]


def test_a_transaction_rings_once_and_only_after_its_commit(alias: str, bell: Doorbell) -> None:
    with transaction.atomic(using=alias):
        for _ in range(50):
            ring_on_commit(alias)
        assert bell.clear() == 0
    assert bell.clear() == 1
    with transaction.atomic(using=alias):
        ring_on_commit(alias)
    assert bell.clear() == 1


def test_a_transaction_rings_once_among_other_hooks(alias: str, bell: Doorbell) -> None:
    with transaction.atomic(using=alias):
        for _ in range(50):
            transaction.on_commit(lambda: None, using=alias)
            ring_on_commit(alias)
    assert bell.clear() == 1


def test_a_rolled_back_transaction_does_not_ring(alias: str, bell: Doorbell) -> None:
    with transaction.atomic(using=alias):
        ring_on_commit(alias)
        transaction.set_rollback(True, using=alias)
    assert bell.clear() == 0
    with transaction.atomic(using=alias):
        ring_on_commit(alias)
    assert bell.clear() == 1


def test_work_outside_a_rolled_back_savepoint_rings(alias: str, bell: Doorbell) -> None:
    with transaction.atomic(using=alias):
        with transaction.atomic(using=alias):
            ring_on_commit(alias)
            transaction.set_rollback(True, using=alias)
        ring_on_commit(alias)
    assert bell.clear() == 1


def test_work_inside_a_rolled_back_savepoint_alone_does_not_ring(
    alias: str, bell: Doorbell
) -> None:
    with transaction.atomic(using=alias), transaction.atomic(using=alias):
        ring_on_commit(alias)
        transaction.set_rollback(True, using=alias)
    assert bell.clear() == 0


def test_work_before_a_rolled_back_savepoint_rings(alias: str, bell: Doorbell) -> None:
    with transaction.atomic(using=alias):
        ring_on_commit(alias)
        with transaction.atomic(using=alias):
            ring_on_commit(alias)
            transaction.set_rollback(True, using=alias)
    assert bell.clear() == 1


def test_autocommit_rings_at_once_and_without_it_nothing_does(alias: str, bell: Doorbell) -> None:
    ring_on_commit(alias)
    assert bell.clear() == 1
    transaction.set_autocommit(False, using=alias)
    ring_on_commit(alias)
    transaction.rollback(using=alias)
    transaction.set_autocommit(True, using=alias)
    assert bell.clear() == 0


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (":memory:", None),
        ("file:shared?mode=memory&cache=shared", None),
        ("file:///var/some%20where.sqlite3?mode=rw", "/var/some where.sqlite3"),
        (Path("/var/some.sqlite3"), "/var/some.sqlite3"),
        ("relative.sqlite3", "relative.sqlite3"),
    ],
)
def test_the_file_behind_an_alias_is_known_and_memory_has_none(
    alias: str, monkeypatch: pytest.MonkeyPatch, name: str | Path, path: str | None
) -> None:
    monkeypatch.setitem(connections[alias].settings_dict, "NAME", name)
    assert database_path(alias) == path


def test_a_database_without_a_file_rings_nothing(
    alias: str, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # What Django's other engines lack.
        patch.delattr(type(connections[alias]), "is_in_memory_db")
        assert database_path(alias) is None
        ring_on_commit(alias)
        with transaction.atomic(using=alias):
            ring_on_commit(alias)
    assert bell.clear() == 0
