"""Others plant links, pipes and foreign files beside the database: nothing of ours goes through.

Each test is done as root and as a member of the group that shares the database's folder.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relay_queue.db.beside import Folder, NotOurs
from relay_queue.db.gate import Gate
from relay_queue.db.gatefile import GateFile
from relay_queue.models import Worker
from relay_queue.wakeup.doorbell import Doorbell, ring
from relay_queue.worker import identity
from relay_queue.worker.liveness import NO_LOCK, Liveness, LivenessLock, LockIdentity, probe
from relay_queue.worker.options import WorkerOptions
from tests.people import GROUP, MEMBER, OTHER_MEMBER, STRANGER, only_root, succeeds_as

NAME = "3f" * 16
WHO = [pytest.param(0, id="root"), pytest.param(MEMBER, id="member", marks=only_root)]

pytestmark = pytest.mark.filterwarnings("ignore:The writer gate")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that a group shares, as the documentation asks for: with setgid."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() == 0:
            os.chown(folder, MEMBER, GROUP)
        folder.chmod(0o2770)
        yield folder


@pytest.fixture
def database(shared: Path) -> Path:
    path = shared / "some.sqlite3"
    path.touch()
    path.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(path, MEMBER, GROUP)
    return path


OPTIONS = WorkerOptions(
    name="planted",
    queues=None,
    exclude_queues=(),
    backend=None,
    concurrency=1,
    lease_seconds=None,
    shutdown_timeout_seconds=1.0,
    drain=False,
    max_jobs=None,
)


class Victim:
    """A file and a directory of the user who is to be led astray, and what they were before."""

    def __init__(self, folder: Path, owner: int) -> None:
        self.file, self.directory, self.missing = (
            folder / "secret",
            folder / "private",
            folder / "missing",
        )
        self.file.touch()  # empty: a file with a text is refused for its size alone
        self.directory.mkdir()
        for path, mode in ((self.file, 0o600), (self.directory, 0o700)):
            path.chmod(mode)
            if os.geteuid() == 0:
                os.chown(path, owner, owner)
        self.before = self.state()

    def state(self) -> tuple[object, ...]:
        def of(path: Path) -> tuple[int, int, int]:
            found = path.stat()
            return found.st_mode, found.st_uid, found.st_gid

        return (
            of(self.file),
            of(self.directory),
            self.file.read_bytes(),
            sorted(os.listdir(self.directory)),
            self.missing.exists(),
        )

    def assert_untouched(self) -> None:
        assert self.state() == self.before


@pytest.fixture
def victim(shared: Path, who: int) -> Victim:
    return Victim(shared, who)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)
    if os.geteuid() == 0:
        os.lchown(path, OTHER_MEMBER, GROUP)


PLANTS: dict[str, Callable[[Path, Victim], object]] = {
    "dangling link": lambda path, victim: link(path, victim.missing),
    "link to a file": lambda path, victim: link(path, victim.file),
    "link to a directory": lambda path, victim: link(path, victim.directory),
    "hard link": lambda path, victim: os.link(victim.file, path),
    "pipe": lambda path, victim: (os.mkfifo(path), path.chmod(0o666)),
}


def use_gate(database: Path) -> None:
    """Take the gate, which a process does before each write."""
    gate = Gate(os.path.realpath(database))
    with gate.acquire(1):
        pass
    assert gate.enabled


def hang_bell(database: Path) -> None:
    Doorbell(str(database), NAME).close()


def hold_lock(database: Path) -> None:
    LivenessLock.hold(str(database), NAME).release()


USES = {"-gate": use_gate, "-gate-next": use_gate, "-bells": hang_bell, "-workers": hold_lock}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("suffix", USES)
@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_is_refused_and_what_it_leads_to_is_left_alone(
    database: Path, victim: Victim, who: int, suffix: str, plant: str
) -> None:
    planted = Path(f"{database}{suffix}")
    PLANTS[plant](planted, victim)
    before = os.lstat(planted)
    assert not succeeds_as(who, lambda: USES[suffix](database), [GROUP])
    assert os.lstat(planted)[:6] == before[:6]
    victim.assert_untouched()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("suffix", USES)
def test_without_a_plant_each_of_them_works(database: Path, who: int, suffix: str) -> None:
    assert succeeds_as(who, lambda: USES[suffix](database), [GROUP])


@pytest.mark.parametrize("who", WHO)
def test_a_gate_file_that_is_something_else_renamed_is_not_written_to(
    database: Path, victim: Victim, who: int
) -> None:
    victim.file.write_text("not a note")
    victim.before = victim.state()
    gate = Path(f"{database}-gate")
    victim.file.rename(gate)
    assert not succeeds_as(who, lambda: use_gate(database), [GROUP])
    gate.rename(victim.file)
    victim.assert_untouched()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("suffix", ["-bells", "-workers"])
def test_a_directory_of_ours_that_was_renamed_is_not_given_away(
    database: Path, victim: Victim, who: int, suffix: str
) -> None:
    (victim.directory / "letter").touch()
    mode = victim.directory.stat().st_mode
    renamed = victim.directory.rename(f"{database}{suffix}")
    succeeds_as(who, lambda: USES[suffix](database), [GROUP])
    assert renamed.stat().st_mode == mode


@pytest.mark.parametrize("who", WHO)
def test_a_gate_file_swapped_in_between_is_refused(
    database: Path, victim: Victim, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is missing, and a link is there when it is to be made."""
    gate = f"{database.name}-gate"
    opened = os.open

    def open_late(path: str, flags: int, *args: int, **where: int) -> int:
        if path == gate and flags & os.O_CREAT and not os.path.islink(f"{database}-gate"):
            os.symlink(victim.file, f"{database}-gate")
        return opened(path, flags, *args, **where)

    monkeypatch.setattr(os, "open", open_late)
    assert not succeeds_as(who, lambda: use_gate(database), [GROUP])
    assert os.path.islink(f"{database}-gate")
    victim.assert_untouched()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("suffix", ["-bells", "-workers"])
def test_a_directory_swapped_in_between_is_refused(
    database: Path, victim: Victim, who: int, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made, and a link is there when its rights are to be set."""
    mkdir = os.mkdir

    def make_and_swap(name: str, mode: int = 0o777, **where: int) -> None:
        mkdir(name, mode, **where)
        os.rmdir(f"{database}{suffix}")
        os.symlink(victim.directory, f"{database}{suffix}")

    monkeypatch.setattr(os, "mkdir", make_and_swap)
    assert not succeeds_as(who, lambda: USES[suffix](database), [GROUP])
    assert os.path.islink(f"{database}{suffix}")
    victim.assert_untouched()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("what", ["link", "directory of another"])
def test_a_socket_swapped_in_between_changes_nothing_elsewhere(
    database: Path, victim: Victim, who: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Folder.share_socket

    def swap_and_share(self: Folder, name: str) -> None:
        hidden = Path(f"{database}-bells", name)
        hidden.unlink()
        if what == "link":
            hidden.symlink_to(victim.file)
        else:
            os.rename(victim.directory, hidden)
        try:
            share(self, name)
        finally:
            if what != "link":
                os.rename(hidden, victim.directory)

    monkeypatch.setattr(Folder, "share_socket", swap_and_share)
    assert not succeeds_as(who, lambda: hang_bell(database), [GROUP])
    victim.assert_untouched()
    assert os.listdir(f"{database}-bells") == []


@pytest.mark.parametrize("who", WHO)
def test_a_worker_file_swapped_for_a_link_is_neither_locked_nor_removed(
    database: Path, victim: Victim, who: int
) -> None:
    def live_and_be_swapped() -> None:
        lock = LivenessLock.hold(str(database), NAME)
        path = Path(lock.path)
        path.unlink()
        path.symlink_to(victim.file)
        status = os.stat(victim.file)
        identity = LockIdentity(status.st_dev, status.st_ino)
        with probe(str(database), NAME, identity) as found:
            assert found.verdict is Liveness.UNKNOWN
        lock.release()
        assert path.is_symlink()

    assert succeeds_as(who, live_and_be_swapped, [GROUP])
    victim.assert_untouched()


@pytest.mark.parametrize("who", WHO)
def test_a_folder_swapped_for_a_link_is_not_probed_rung_or_cleared(
    database: Path, victim: Victim, who: int
) -> None:
    def live_and_be_swapped() -> None:
        lock, bell = LivenessLock.hold(str(database), NAME), Doorbell(str(database), NAME)
        for suffix in ("-workers", "-bells"):
            os.rename(f"{database}{suffix}", f"{database}{suffix}.moved")
            os.symlink(f"{database}{suffix}.moved", f"{database}{suffix}")
        with probe(str(database), NAME, lock.identity) as found:
            assert found.verdict is Liveness.UNKNOWN
        assert ring(str(database)) == 0
        lock.release()
        bell.close()
        for suffix in ("-workers", "-bells"):
            assert os.listdir(f"{database}{suffix}.moved") == [NAME]

    assert succeeds_as(who, live_and_be_swapped, [GROUP])


def test_a_ring_does_not_go_through_a_link_to_a_socket(database: Path) -> None:
    other = database.with_name("other.sqlite3")
    other.touch()
    bell, own = Doorbell(str(other), NAME), Doorbell(str(database), "own")
    os.symlink(bell.path, f"{database}-bells/{NAME}")
    assert ring(str(database)) == 1
    assert bell.clear() == 0
    bell.close()
    own.close()


def test_the_database_itself_may_be_a_link(database: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(database)
    for use in USES.values():
        use(tmp_path / "link")
    beside = {"-gate", "-gate-next", "-bells", "-workers"}
    assert {name.removeprefix(database.name) for name in os.listdir(database.parent)} >= beside


@pytest.mark.usefixtures("transactional_db")
def test_a_worker_goes_without_lock_and_bell_and_says_so(
    database: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in ("-workers", "-bells"):
        os.symlink(database.parent, f"{database}{suffix}")
    monkeypatch.setattr(identity, "database_path", lambda using: str(database))
    worker = identity.register(OPTIONS)
    row = Worker.objects.get(pk=worker.worker_id)
    assert (worker.lock, worker.bell) == (None, None)
    assert (row.lock_device, row.lock_inode) == (None, None)
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(" beside ")[0] for message in told] == ["No worker file", "No doorbell"]
    assert all("it is a symbolic link" in message for message in told)
    worker.retire()


@pytest.mark.usefixtures("transactional_db")
def test_a_worker_that_finds_no_room_for_its_lock_does_not_start_without(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room comes back, and it tries again: an hour without proof of its death is not worth it."""

    def hold(*_: object) -> LivenessLock:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LivenessLock, "hold", hold)
    monkeypatch.setattr(identity, "database_path", lambda using: str(database))
    with pytest.raises(OSError, match="No space left"):
        identity.register(OPTIONS)
    assert not Worker.objects.exists()


# --- Who may take part ---------------------------------------------------------


def modes(database: Path) -> dict[str, tuple[int, int]]:
    return {
        suffix: (stat.S_IMODE(found.st_mode), found.st_gid)
        for suffix in USES
        if (found := os.lstat(f"{database}{suffix}"))
    }


@only_root
@pytest.mark.parametrize("first", [0, MEMBER, OTHER_MEMBER])
def test_all_members_take_part_whoever_was_first(database: Path, first: int) -> None:
    """The first one's own umask and primary group do not lock the others out."""

    def use_all() -> None:
        os.umask(0o077)
        for use in USES.values():
            use(database)

    database.parent.chmod(0o770)  # without setgid, what is made has its maker's primary group
    for user in (first, 0, MEMBER, OTHER_MEMBER):
        assert succeeds_as(user, use_all, [user or GROUP, GROUP]), user
    assert modes(database) == {
        "-gate": (0o660, GROUP),
        "-gate-next": (0o660, GROUP),
        "-bells": (0o770, GROUP),
        "-workers": (0o770, GROUP),
    }


@only_root
def test_who_may_only_read_the_database_cannot_hold_its_gate(database: Path) -> None:
    database.chmod(0o664)
    database.parent.chmod(0o2775)
    assert succeeds_as(MEMBER, lambda: use_gate(database), [GROUP])
    for suffix in ("-gate", "-gate-next"):
        assert stat.S_IMODE(os.stat(f"{database}{suffix}").st_mode) == 0o660

    def hold_as_reader() -> None:
        database.read_bytes()
        for suffix in ("-gate", "-gate-next"):
            with pytest.raises(PermissionError):
                os.open(f"{database}{suffix}", os.O_RDONLY)
        assert GateFile(str(database)).read_holder() is None

    assert succeeds_as(STRANGER, hold_as_reader)


@only_root
@pytest.mark.parametrize("suffix", USES)
def test_what_a_stranger_has_put_there_is_not_used(database: Path, suffix: str) -> None:
    path = Path(f"{database}{suffix}")
    if suffix in ("-bells", "-workers"):
        path.mkdir()
    else:
        path.touch()
    path.chmod(0o777)
    os.chown(path, STRANGER, STRANGER)
    assert not succeeds_as(0, lambda: USES[suffix](database))
    assert not succeeds_as(MEMBER, lambda: USES[suffix](database), [GROUP])
    assert os.stat(path).st_uid == STRANGER


def test_rights_that_the_database_has_got_since_are_passed_on(database: Path) -> None:
    def use_before_and_after() -> None:
        os.chmod(database, 0o600)
        for use in USES.values():
            use(database)
        os.chmod(database, 0o666)
        for use in USES.values():
            use(database)

    user = MEMBER if os.geteuid() == 0 else 0
    assert succeeds_as(user, use_before_and_after, [GROUP])
    assert [mode for mode, _ in modes(database).values()] == [0o666, 0o666, 0o777, 0o777]


def test_a_refusal_names_the_file_the_reason_and_the_way_out(database: Path) -> None:
    os.symlink("/nowhere", f"{database}-workers")
    with pytest.raises(NotOurs) as raised:
        LivenessLock.hold(str(database), NAME)
    assert "it is a symbolic link" in str(raised.value)
    assert f"{database}-workers" in str(raised.value)
    assert "remove it" in str(raised.value)
    with probe(str(database), NAME, NO_LOCK) as found:
        assert found.verdict is Liveness.UNKNOWN
