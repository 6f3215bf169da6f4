"""What a worker on SQLite has beside the database: a lock file that says whether its process is there, and a doorbell.

The processes that hold a lock are real ones, which the tests stop and kill.
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.ids import time_ordered_uuid
from queue_core.model import Worker, WorkerId
from tests.support.children import Child, running
from tests.support.clock import ManualClock
from tests.support.databases import SqliteDatabase
from tests.support.store import new_worker, opened_backend

pytestmark = pytest.mark.sqlite_only("a Postgres server may be on another machine")

presence: Any = import_module("queue_core.backends.sqlite_presence")

DAY = timedelta(days=1)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="sockets whose names are no files are Linux's")


# The lock file


@pytest.fixture
def jobs_db(tmp_path: Path) -> Path:
    """A database, as far as lock files are concerned."""
    path = tmp_path / "jobs.db"
    path.touch()
    return path


_HOLD = """
import os, subprocess, sys
from pathlib import Path
from queue_core.backends.sqlite_presence import LockFile

lock = LockFile(Path(sys.argv[1]), sys.argv[2])
print(lock.hold(), flush=True)
if sys.argv[3] == "fork" and (child := os.fork()):
    print(child, flush=True)
if sys.argv[3] == "start":
    program = "import sys; print('started', flush=True); sys.stdin.read()"
    subprocess.Popen([sys.executable, "-c", program], close_fds=False)
sys.stdin.read()
"""


@contextmanager
def holder(database: Path, then: str = "wait") -> Generator[tuple[Child, str]]:
    """A process that holds a lock file, and the name of that."""
    with running(sys.executable, "-c", _HOLD, database, new_id(), then) as child:
        name = child.says()
        assert database.with_name(name).exists()
        yield child, name


def files_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def new_id() -> WorkerId:
    return WorkerId(time_ordered_uuid())


def held_in(database: Path) -> Any:
    """A lock that this process holds."""
    lock = presence.LockFile(database, new_id())
    assert lock.hold() == lock.path.name
    return lock


def test_a_lock_that_is_held_is_not_free_however_often_one_looks(jobs_db: Path) -> None:
    lock = held_in(jobs_db)
    for _ in range(3):
        assert not presence.is_free(jobs_db, lock.path.name)
    lock.let_go()


def test_a_lock_that_was_let_go_leaves_no_file_and_proves_nothing(jobs_db: Path) -> None:
    lock = held_in(jobs_db)
    lock.let_go()
    lock.let_go()
    assert files_in(jobs_db.parent) == {jobs_db.name}
    assert not presence.is_free(jobs_db, lock.path.name)


def test_a_file_that_is_not_there_proves_nothing_and_is_not_made(jobs_db: Path) -> None:
    assert not presence.is_free(jobs_db, "jobs.db-worker-1")
    assert not presence.is_free(jobs_db.parent / "nowhere" / "jobs.db", "jobs.db-worker-1")
    assert files_in(jobs_db.parent) == {jobs_db.name}


def test_the_lock_of_a_process_is_held_as_long_as_it_lives_and_free_once_it_was_killed(jobs_db: Path) -> None:
    with holder(jobs_db) as (child, name):
        assert not presence.is_free(jobs_db, name)
        child.kill()
        assert presence.is_free(jobs_db, name)
        assert presence.is_free(jobs_db, name)


def test_the_lock_of_a_killed_process_that_nobody_waited_for_is_free(jobs_db: Path) -> None:
    with holder(jobs_db) as (child, name):
        child.kill_without_waiting()
        assert presence.is_free(jobs_db, name)


def test_a_process_that_is_stopped_for_a_while_holds_its_lock(jobs_db: Path) -> None:
    with holder(jobs_db) as (child, name):
        child.stop()
        assert not presence.is_free(jobs_db, name)
        child.kill()
        assert presence.is_free(jobs_db, name)


def test_a_forked_child_of_the_process_keeps_its_lock(jobs_db: Path) -> None:
    """It may be the one that runs the job: nothing is proved until it has ended as well."""
    with holder(jobs_db, "fork") as (child, name):
        forked = int(child.says())
        child.kill()
        assert not presence.is_free(jobs_db, name)
        os.kill(forked, signal.SIGKILL)
        _until_free(jobs_db, name)


def _until_free(database: Path, name: str) -> None:
    """Nobody can wait for the end of a process that is not a child of theirs; it comes a moment after the signal."""
    deadline = time.monotonic() + 30
    while not presence.is_free(database, name):
        assert time.monotonic() < deadline


def test_a_program_that_the_process_started_does_not_keep_its_lock(jobs_db: Path) -> None:
    with holder(jobs_db, "start") as (child, name):
        assert child.says() == "started"
        child.kill()
        assert presence.is_free(jobs_db, name)


def test_the_lock_is_known_by_its_name_wherever_the_folder_is_mounted(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.symlink_to(here)
    with holder(here / "jobs.db") as (child, name):
        assert "/" not in name
        assert not presence.is_free(there / "jobs.db", name)
        child.kill()
        assert presence.is_free(there / "jobs.db", name)
        presence.remove_free(there / "jobs.db", [name])
        assert not (here / name).exists()


def test_where_no_lock_can_be_had_there_is_no_name_and_nothing_to_let_go(tmp_path: Path) -> None:
    for database in (tmp_path / "nowhere" / "jobs.db", tmp_path / ("a" * 240)):
        before = _open_files()
        lock = presence.LockFile(database, new_id())
        assert lock.hold() is None
        lock.let_go()
        assert _open_files() == before
    assert files_in(tmp_path) == set()


def test_a_lock_that_somebody_else_holds_is_left_to_them(jobs_db: Path) -> None:
    with holder(jobs_db) as (child, name):
        worker = WorkerId(name.rpartition("worker-")[2])
        assert presence.LockFile(jobs_db, worker).hold() is None
        child.kill()
        assert presence.is_free(jobs_db, name)


@pytest.mark.skipif(sys.platform != "linux", reason="the open files of a process are seen in /proc")
def test_looking_leaves_nothing_open(jobs_db: Path) -> None:
    lock = held_in(jobs_db)
    with holder(jobs_db) as (child, name):
        child.kill()
        before = _open_files()
        for each in (name, lock.path.name, "jobs.db-worker-1"):
            presence.is_free(jobs_db, each)
        presence.remove_free(jobs_db, [name, lock.path.name, "jobs.db-worker-1"])
        assert _open_files() == before
    lock.let_go()


def _open_files() -> int:
    return len(files_in(Path("/proc/self/fd"))) if sys.platform == "linux" else 0


def test_only_what_is_free_is_removed(jobs_db: Path) -> None:
    lock = held_in(jobs_db)
    with holder(jobs_db) as (dead, left), holder(jobs_db) as (_living, held):
        dead.kill()
        presence.remove_free(jobs_db, [held, "jobs.db-worker-1", left, lock.path.name])
        assert files_in(jobs_db.parent) == {jobs_db.name, held, lock.path.name}
    lock.let_go()


# Workers and their files


_REGISTER = """
import asyncio, sys
from sqlalchemy.ext.asyncio import create_async_engine
from queue_core.config import QueueConfig
from queue_core.connect import connect
from tests.support.clock import ManualClock
from tests.support.store import new_worker

async def main():
    backend = connect(create_async_engine(sys.argv[1]), QueueConfig(), ManualClock())
    await backend.open(migrate=False)
    worker = await backend.register_worker(new_worker())
    print(worker.lock_file, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@contextmanager
def registered(database: SqliteDatabase) -> Generator[tuple[Child, Path]]:
    """A process with a worker, and the lock file of that."""
    repository = Path(__file__).parents[2]
    with running(sys.executable, "-c", _REGISTER, database.url, PYTHONPATH=str(repository)) as child:
        path = database.path.with_name(child.says())
        assert path.exists()
        yield child, path


async def test_a_prune_takes_the_files_of_dead_workers_and_never_one_that_is_held(
    backend: Backend, clock: ManualClock, database: SqliteDatabase
) -> None:
    own = await backend.register_worker(new_worker())
    with registered(database) as (dead, left), registered(database) as (stopped, held):
        dead.kill()
        stopped.stop()
        clock.advance(2 * DAY)
        assert await backend.prune(older_than=DAY, limit=10) == 3
        assert database.count("queue_workers") == 0
        assert not left.exists()
        assert held.exists()
        assert _lock_file(database, own).exists()


async def test_the_files_of_workers_that_are_not_pruned_stay(
    backend: Backend, clock: ManualClock, database: SqliteDatabase
) -> None:
    with registered(database) as (dead, left):
        dead.kill()
    clock.advance(DAY)
    assert await backend.prune(older_than=DAY, limit=10) == 0
    assert left.exists()
    clock.advance(DAY)
    assert await backend.prune(older_than=DAY, limit=10) == 1
    assert not left.exists()


async def test_a_backend_that_closes_takes_the_files_and_sockets_of_all_its_workers_with_it(
    engine: AsyncEngine, clock: ManualClock, database: SqliteDatabase
) -> None:
    async with opened_backend(engine, clock) as backend:
        workers = [await backend.register_worker(new_worker()) for _ in range(3)]
        for worker in workers:
            assert _lock_file(database, worker).exists()
            assert _answers(worker.wakeup_address)
    for worker in workers:
        assert not _lock_file(database, worker).exists()
        assert not _answers(worker.wakeup_address)


async def test_a_worker_that_stops_takes_its_own_file_and_socket_with_it(
    backend: Backend, database: SqliteDatabase
) -> None:
    leaves, stays = [await backend.register_worker(new_worker()) for _ in range(2)]
    await backend.forget_worker(leaves.id)
    assert not _lock_file(database, leaves).exists()
    assert not _answers(leaves.wakeup_address)
    assert _lock_file(database, stays).exists()
    assert _answers(stays.wakeup_address)


def _lock_file(database: SqliteDatabase, worker: Worker) -> Path:
    assert worker.lock_file is not None
    return database.path.with_name(worker.lock_file)


def _answers(address: str | None) -> bool:
    """Whether somebody listens there."""
    assert address is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError:
            return False
    return True


# The doorbell


class Rings:
    """Counts rings."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._rung.set()

    async def next(self) -> None:
        await asyncio.wait_for(self._rung.wait(), 10)
        self._rung.clear()


@asynccontextmanager
async def doorbell() -> AsyncGenerator[tuple[str, Rings]]:
    """The address of an open one, and what it rings."""
    rings = Rings()
    bell = presence.Doorbell(new_id(), rings)
    address = bell.open()
    assert address is not None
    try:
        yield address, rings
    finally:
        bell.close()
        bell.close()


@pytest.fixture(params=[pytest.param("a name", marks=on_linux), "a file"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> str:
    """What the address is: a name in the kernel, as on Linux, or a file, as elsewhere."""
    if request.param == "a file":
        monkeypatch.setattr(presence, "sys", SimpleNamespace(platform="darwin"))
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return str(request.param)


@pytest.fixture
def temporary() -> Generator[Path]:
    """A folder for sockets: the path of a test's own is too long for their addresses."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.usefixtures("kind")
async def test_one_datagram_is_one_ring() -> None:
    async with doorbell() as (address, rings):
        for count in (1, 2, 3):
            presence.ring([address])
            await rings.next()
            assert rings.count == count


@pytest.mark.usefixtures("kind")
async def test_many_datagrams_are_one_ring_at_the_least_and_the_next_one_is_heard_again() -> None:
    async with doorbell() as (address, rings):
        for _ in range(2):
            for _ in range(5):
                presence.ring([address])
            await rings.next()
            assert 1 <= rings.count <= 5
            rings.count = 0


@pytest.mark.usefixtures("kind")
async def test_one_who_has_plenty_to_read_keeps_nobody_waiting_and_hears_the_next_ring() -> None:
    async with doorbell() as (full, rings), doorbell() as (address, others):
        # Nobody reads while the loop does not run; a ringer that waited for room would wait for ever.
        for _ in range(5_000):
            presence.ring([full])
        presence.ring([full, address])
        await others.next()
        await rings.next()
        presence.ring([full])
        await rings.next()


@pytest.mark.usefixtures("kind")
async def test_an_address_at_which_nobody_is_any_more_is_passed_over(tmp_path: Path) -> None:
    async with doorbell() as (gone, unheard):
        pass
    (tmp_path / "no-socket").touch()
    addresses = [gone, "@nobody", "@", "", str(tmp_path / "nowhere.sock"), str(tmp_path / "no-socket"), "/x" * 200]
    async with doorbell() as (address, rings):
        presence.ring([*addresses, address])
        await rings.next()
        presence.ring([address, *addresses])
        await rings.next()
    assert unheard.count == 0


async def test_without_addresses_there_is_nothing_to_ring() -> None:
    presence.ring([])


async def test_a_doorbell_leaves_no_file_behind(kind: str, temporary: Path) -> None:
    async with doorbell() as (address, _):
        assert address.startswith("@") == (kind == "a name")
        assert len(files_in(temporary)) == (kind == "a file")
    assert files_in(temporary) == set()


async def test_where_the_address_would_be_too_long_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(presence, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("a" * 100)))
    bell = presence.Doorbell(new_id(), Rings())
    assert bell.open() is None
    bell.close()


async def test_a_ring_that_came_before_the_close_is_not_heard_after_it() -> None:
    rings = Rings()
    bell = presence.Doorbell(new_id(), rings)
    presence.ring([bell.open()])
    bell.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert rings.count == 0
