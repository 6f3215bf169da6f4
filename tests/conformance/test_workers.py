"""A worker's own row: written when it starts or claims, renewed, marked when it stops, and what proves its life."""

import fcntl
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core.backend import Backend
from queue_core.ids import time_ordered_uuid
from queue_core.model import JobStatus, WorkerId
from tests.support.clock import ManualClock
from tests.support.databases import Database, SqliteDatabase
from tests.support.processes import run_python
from tests.support.store import (
    LEASE,
    claim,
    claim_again,
    claimed,
    holder_of,
    knowing,
    moment,
    new_worker,
    opened_backend,
    stored,
)

MOMENT = timedelta(microseconds=1)
HOUR = timedelta(hours=1)
REPOSITORY = Path(__file__).parents[2]

lock_files = pytest.mark.sqlite_only("lock files beside the database: a Postgres server may be on another machine")


# Registering


async def test_a_registered_worker_has_a_row_with_a_fresh_lease(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = await backend.register_worker(new_worker(host="web-1", pid=4711))
    ((worker_id, host, pid, started_at, lease_until, stopped_at),) = database.query(
        "SELECT id, host, pid, started_at, lease_until, stopped_at FROM queue_workers"
    )
    assert (str(worker_id), host, pid) == (worker.id, "web-1", 4711)
    assert (moment(started_at), moment(lease_until)) == (clock.now(), clock.now() + LEASE)
    assert stopped_at is None


async def test_a_worker_comes_back_as_it_has_to_be_named_from_now_on(backend: Backend) -> None:
    """The backend adds where the worker can be reached and what it locks; the rest is as it was."""
    worker = new_worker()
    registered = await backend.register_worker(worker)
    assert replace(registered, wakeup_address=None, lock_file=None) == worker
    await claimed(backend, registered)
    assert (await holder_of(backend, worker)).worker == registered


async def test_registering_again_renews_the_lease(backend: Backend, clock: ManualClock, database: Database) -> None:
    worker = await backend.register_worker(new_worker())
    await claimed(backend, worker)
    clock.advance(LEASE)
    assert await backend.register_worker(worker) == worker
    assert (await holder_of(backend, worker)).lease_until == clock.now() + LEASE
    assert database.count("queue_workers") == 1


async def test_a_worker_that_claimed_before_it_registered_is_known_as_it_registered(backend: Backend) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    registered = await backend.register_worker(worker)
    assert (await holder_of(backend, worker)).worker == registered


async def test_a_claim_writes_the_row_of_a_worker_that_has_none(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    holder = await holder_of(backend, worker)
    assert (holder.worker, holder.lease_until) == (worker, clock.now() + LEASE)


async def test_a_claim_that_finds_nothing_leaves_a_worker_no_holder(backend: Backend) -> None:
    assert await claim(backend, new_worker()) == []
    assert list(await backend.holders(["notes"])) == []


# Stopping


async def test_whatever_a_worker_still_holds_when_it_stops_may_be_taken_at_once(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = await backend.register_worker(new_worker())
    job = await claimed(backend, worker)
    await backend.forget_worker(worker.id)
    assert [moment(at) for (at,) in database.query("SELECT stopped_at FROM queue_workers")] == [clock.now()]
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED
    assert list((await backend.reap(["notes"], limit=10)).requeued) == [job.claim.job_id]


async def test_a_worker_that_stops_takes_nobody_with_it(backend: Backend) -> None:
    worker, other = new_worker(), new_worker()
    for each in (worker, other):
        await backend.register_worker(each)
    await claimed(backend, other)
    await backend.forget_worker(worker.id)
    assert not (await holder_of(backend, other)).stopped
    assert len(await backend.reap(["notes"], limit=10)) == 0


async def test_a_worker_may_stop_twice_or_without_having_been_there(backend: Backend, database: Database) -> None:
    worker = await backend.register_worker(new_worker())
    for worker_id in (worker.id, worker.id, WorkerId(time_ordered_uuid())):
        await backend.forget_worker(worker_id)
    assert database.count("queue_workers") == 1


async def test_a_worker_that_beats_after_it_stopped_is_there_again(backend: Backend) -> None:
    worker = await backend.register_worker(new_worker())
    job = await claimed(backend, worker)
    await backend.forget_worker(worker.id)
    assert list((await backend.beat(worker, knowing([job.claim], []))).lost) == []
    assert not (await holder_of(backend, worker)).stopped
    assert len(await backend.reap(["notes"], limit=10)) == 0


async def test_a_worker_that_claims_after_it_stopped_is_there_again(backend: Backend, clock: ManualClock) -> None:
    worker = await backend.register_worker(new_worker())
    await backend.forget_worker(worker.id)
    clock.advance(MOMENT)
    await claimed(backend, worker)
    holder = await holder_of(backend, worker)
    assert (holder.stopped, holder.lease_until) == (False, clock.now() + LEASE)
    assert len(await backend.reap(["notes"], limit=10)) == 0


async def test_a_worker_that_registers_after_it_stopped_is_there_again(backend: Backend) -> None:
    worker = await backend.register_worker(new_worker())
    await claimed(backend, worker)
    await backend.forget_worker(worker.id)
    assert await backend.register_worker(worker) == worker
    assert not (await holder_of(backend, worker)).stopped
    assert len(await backend.reap(["notes"], limit=10)) == 0


# The lock file beside the database, which says whether the process is there


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of a file that has to be there."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def lock_file(database: SqliteDatabase, name: str | None) -> Path:
    assert name is not None
    return database.path.parent / name


@lock_files
async def test_a_registered_worker_holds_the_lock_of_a_file_of_its_own(
    backend: Backend, database: SqliteDatabase
) -> None:
    one, two = await backend.register_worker(new_worker()), await backend.register_worker(new_worker())
    assert one.wakeup_address is not None
    assert one.lock_file != two.lock_file
    for worker in (one, two):
        assert is_locked(lock_file(database, worker.lock_file))
    await backend.forget_worker(one.id)
    assert not lock_file(database, one.lock_file).exists()
    assert is_locked(lock_file(database, two.lock_file))


@lock_files
async def test_registering_again_keeps_the_lock(backend: Backend, database: SqliteDatabase) -> None:
    worker = await backend.register_worker(new_worker())
    assert await backend.register_worker(worker) == worker
    assert is_locked(lock_file(database, worker.lock_file))
    await backend.forget_worker(worker.id)
    assert not lock_file(database, worker.lock_file).exists()


@lock_files
async def test_a_backend_that_closes_leaves_no_lock_file(
    engine: AsyncEngine, clock: ManualClock, database: SqliteDatabase
) -> None:
    async with opened_backend(engine, clock) as backend:
        worker = await backend.register_worker(new_worker())
        assert lock_file(database, worker.lock_file).exists()
    assert not lock_file(database, worker.lock_file).exists()


@lock_files
async def test_a_worker_has_its_lock_file_in_a_folder_with_a_long_name(tmp_path: Path, clock: ManualClock) -> None:
    """The address of a socket may not be longer than a hundred characters."""
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    folder.mkdir(parents=True)
    database = SqliteDatabase(folder / "jobs.db")
    engine = create_async_engine(database.url)
    async with opened_backend(engine, clock) as backend:
        worker = await backend.register_worker(new_worker())
        await claimed(backend, worker)
        assert is_locked(lock_file(database, worker.lock_file))
        assert not (await holder_of(backend, worker)).let_go
    await engine.dispose()


@lock_files
async def test_a_worker_without_a_lock_has_not_let_go_of_it(backend: Backend) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    assert not (await holder_of(backend, worker)).let_go


KILLED = """
import asyncio, os, signal, sys
from sqlalchemy.ext.asyncio import create_async_engine
from queue_core.config import QueueConfig
from queue_core.connect import connect
from tests.support.store import claimed, new_worker

async def main():
    backend = connect(create_async_engine(sys.argv[1]), QueueConfig(), None)
    await backend.open(migrate=True)
    await claimed(backend, await backend.register_worker(new_worker()))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def run_and_kill_a_worker(database: Database) -> None:
    """A process that registers a worker, claims a job and is killed."""
    ended = run_python("-c", KILLED, database.url, cwd=REPOSITORY)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@lock_files
async def test_a_killed_process_has_let_go_of_its_lock(backend: Backend, database: SqliteDatabase) -> None:
    live = await backend.register_worker(new_worker())
    await claimed(backend, live)
    run_and_kill_a_worker(database)
    (killed,) = [holder for holder in await backend.holders(["notes"]) if holder.worker.id != live.id]
    assert (killed.let_go, killed.stopped) == (True, False)
    assert not is_locked(lock_file(database, killed.worker.lock_file))
    assert not (await holder_of(backend, live)).let_go


@lock_files
async def test_a_lock_file_that_is_gone_proves_nothing(backend: Backend, database: SqliteDatabase) -> None:
    run_and_kill_a_worker(database)
    (killed,) = await backend.holders(["notes"])
    path = lock_file(database, killed.worker.lock_file)
    path.unlink()
    assert not (await holder_of(backend, killed.worker)).let_go
    assert not path.exists()


@lock_files
async def test_looking_at_a_lock_does_not_take_it(backend: Backend, database: SqliteDatabase) -> None:
    run_and_kill_a_worker(database)
    for _ in range(3):
        (killed,) = await backend.holders(["notes"])
        assert killed.let_go
        assert not is_locked(lock_file(database, killed.worker.lock_file))


@lock_files
async def test_the_lock_file_of_a_killed_process_goes_with_its_row(
    backend: Backend, clock: ManualClock, database: SqliteDatabase
) -> None:
    run_and_kill_a_worker(database)
    live = await backend.register_worker(new_worker())
    (killed,) = await backend.holders(["notes"])
    swept = await backend.sweep_orphans(["notes"], [killed.worker.id], park=False, limit=10)
    assert len(swept.requeued) == 1
    clock.advance(HOUR)
    await backend.beat(live, knowing([], []))
    assert await backend.prune(older_than=HOUR - MOMENT, limit=10) == 1
    assert not lock_file(database, killed.worker.lock_file).exists()
    assert is_locked(lock_file(database, live.lock_file))
    assert (await claim_again(backend, swept.requeued[0])).attempt == 2


@pytest.mark.postgres_only("a server that may be on another machine knows nothing of locks on files")
async def test_on_postgres_nobody_is_seen_to_let_go(backend: Backend, database: Database) -> None:
    run_and_kill_a_worker(database)
    (killed,) = await backend.holders(["notes"])
    assert (killed.let_go, killed.stopped) == (False, False)
