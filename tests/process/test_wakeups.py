"""What one process commits wakes those who wait in another one, and only when it can be claimed.

The other process is `tests/support/sender.py`. What it tells is heard in two ways: by a backend that waits here, and
by ears that owe nothing to one. A process that has ended has said all that it had to say.
"""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from queue_core import BackendError
from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.model import Wakeup
from tests.support.databases import Database, SqliteDatabase
from tests.support.ears import listening_to
from tests.support.jobs import new_job
from tests.support.processes import output_of
from tests.support.sender import Sender, sending
from tests.support.store import claimed, enqueue, listening, new_worker

presence: Any = import_module("queue_core.backends.sqlite_presence")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="sockets whose names are no files are Linux's")


@pytest.fixture
async def quiet(engine: AsyncEngine) -> AsyncGenerator[Backend]:
    """For what has to be there first: it tells other processes nothing, and hears of nobody's commits."""
    quiet = connect(engine, QueueConfig(notify=False), None)
    await quiet.open(migrate=True)
    yield quiet
    await quiet.close()


@pytest.fixture
async def store(engine: AsyncEngine, quiet: Backend) -> AsyncGenerator[Backend]:
    """Waits for what other processes do."""
    del quiet  # the tables are there
    store = connect(engine, QueueConfig(), None)
    await store.open(migrate=False)
    yield store
    await store.close()


# What there is to claim, and how it got there

Step: TypeAlias = Sequence[object]
Way: TypeAlias = Callable[[Backend], Awaitable[Sequence[Step]]]


async def _enqueued(_quiet: Backend) -> Sequence[Step]:
    return [["enqueue", "notes"]]


async def _enqueued_in_bulk(_quiet: Backend) -> Sequence[Step]:
    return [["enqueue", "notes", 2_500]]


async def _joined_and_committed(_quiet: Backend) -> Sequence[Step]:
    return [["join", "notes"], ["commit"]]


async def _ticked(_quiet: Backend) -> Sequence[Step]:
    return [["tick", "notes"]]


async def _retried(quiet: Backend) -> Sequence[Step]:
    job = await claimed(quiet)
    return [["retry", job.claim.job_id, job.claim.token]]


async def _snoozed(quiet: Backend) -> Sequence[Step]:
    job = await claimed(quiet)
    return [["snooze", job.claim.job_id, job.claim.token]]


async def _released(quiet: Backend) -> Sequence[Step]:
    job = await claimed(quiet)
    return [["release", job.claim.job_id, job.claim.token]]


async def _promoted(quiet: Backend) -> Sequence[Step]:
    await enqueue(quiet, new_job(delay=timedelta(milliseconds=1)))
    # Only when it is due, by the clock that decides.
    while await quiet.next_due(["notes"]):
        pass
    return [["promote", "notes"]]


async def _resumed(quiet: Backend) -> Sequence[Step]:
    await quiet.pause("notes")
    await enqueue(quiet, new_job())
    return [["resume", "notes"]]


async def _reaped(quiet: Backend) -> Sequence[Step]:
    worker = await quiet.register_worker(new_worker())
    await claimed(quiet, worker)
    await quiet.forget_worker(worker.id)
    return [["reap", "notes"]]


async def _swept(quiet: Backend) -> Sequence[Step]:
    worker = new_worker()
    await claimed(quiet, worker)
    return [["sweep", "notes", worker.id]]


# In an order in which all of them can be prepared at once: a paused queue gives nothing to claim.
WAYS: Mapping[str, Way] = {
    "retried": _retried,
    "snoozed": _snoozed,
    "released": _released,
    "reaped": _reaped,
    "swept": _swept,
    "promoted": _promoted,
    "resumed": _resumed,
    "enqueued": _enqueued,
    "enqueued in bulk": _enqueued_in_bulk,
    "enqueued in a transaction of the caller's": _joined_and_committed,
    "enqueued by a schedule": _ticked,
}


async def _do(sender: Sender, steps: Sequence[Step]) -> None:
    for step in steps:
        await sender.do(*step)


# Both databases


@pytest.mark.parametrize("way", WAYS)
async def test_what_can_be_claimed_now_wakes_whoever_waits_for_its_queue_in_another_process(
    quiet: Backend, store: Backend, database: Database, way: str
) -> None:
    steps = await WAYS[way](quiet)
    async with listening_to(database, quiet, "notes", "other") as ears:
        with sending(database) as sender:
            async with store.wakeups(["notes"]) as hints:
                await _do(sender, steps)
                assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")
            await sender.leave()
        assert ears.heard() == ["notes"]


async def test_a_process_that_is_not_to_notify_tells_nobody(quiet: Backend, database: Database) -> None:
    steps = [step for way in WAYS.values() for step in await way(quiet)]
    async with listening_to(database, quiet, "notes", "other") as ears:
        with sending(database, notify=False) as sender:
            await _do(sender, steps)
            await sender.leave()
        assert ears.heard() == []


async def test_all_queues_of_a_process_are_told_of(quiet: Backend, database: Database) -> None:
    async with listening_to(database, quiet, "notes", "mails", "other") as ears:
        with sending(database) as sender:
            await _do(sender, [["enqueue", "notes"], ["enqueue", "mails"]])
            await sender.leave()
        assert sorted(ears.heard()) == ["mails", "notes"]


async def test_what_is_still_to_be_told_is_told_before_the_process_ends(quiet: Backend, database: Database) -> None:
    async with listening_to(database, quiet, "notes", "other") as ears:
        with sending(database, rest=3600) as sender:
            await sender.do("enqueue", "notes")
            assert await ears.next_heard() == ["notes"]
            for _ in range(3):
                await sender.do("enqueue", "notes")
            assert ears.heard() == []
            await sender.leave()
        assert ears.heard() == ["notes"]


async def test_a_transaction_that_is_rolled_back_tells_nobody(quiet: Backend, database: Database) -> None:
    async with listening_to(database, quiet, "notes") as ears:
        with sending(database) as sender:
            await _do(sender, [["join", "notes"], ["join", "notes"], ["rollback"]])
            await sender.leave()
        assert ears.heard() == []
    assert database.count() == 0


async def test_a_transaction_that_is_never_ended_tells_nobody(quiet: Backend, database: Database) -> None:
    async with listening_to(database, quiet, "notes") as ears:
        with sending(database) as sender:
            await sender.do("join", "notes")
            await sender.leave()
        assert ears.heard() == []


async def test_a_queue_that_is_closed_right_after_the_callers_commit_has_told_of_it(
    quiet: Backend, engine: AsyncEngine, database: Database
) -> None:
    async with listening_to(database, quiet, "notes") as ears:
        for _ in range(10):
            backend = connect(engine, QueueConfig(), None)
            await backend.open(migrate=False)
            async with AsyncSession(engine) as session:
                await (await session.connection()).run_sync(backend.enqueue_on, [new_job()])
                await session.commit()
                await backend.close()
            assert ears.heard() == ["notes"]


async def test_whoever_has_given_up_waiting_hears_of_what_comes_next(store: Backend, database: Database) -> None:
    with sending(database) as sender:
        async with store.wakeups(["notes"]) as hints:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(hints), 0.001)
            await sender.do("enqueue", "notes")
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")


# Postgres


@pytest.mark.postgres_only("SQLite says that something was committed, and not where")
async def test_whoever_waits_for_another_queue_sleeps_on(store: Backend, database: Database) -> None:
    with sending(database) as sender:
        async with listening(store, "other") as woken, store.wakeups(["first", "last"]) as hints:
            await _do(sender, [["enqueue", "notes"], ["enqueue", "first"]])
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("first")
            await sender.do("enqueue", "last")
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
            assert not woken.done()
            await sender.do("enqueue", "other")
            assert await asyncio.wait_for(woken, 10) == Wakeup("other")


@pytest.mark.postgres_only("SQLite says that something was committed, and not where")
async def test_an_open_transaction_wakes_nobody_and_a_rolled_back_one_neither(
    store: Backend, database: Database
) -> None:
    with sending(database) as sender:
        async with listening(store, "notes") as woken, store.wakeups(["first", "last"]) as hints:
            await _do(sender, [["join", "notes"], ["enqueue", "first"]])
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("first")
            await _do(sender, [["rollback"], ["enqueue", "last"]])
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
            await _do(sender, [["enqueue", "first"]])
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("first")
            assert not woken.done()
            await _do(sender, [["join", "notes"], ["commit"]])
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


# SQLite: the two ways to hear, each on its own


@on_linux
@pytest.mark.sqlite_only("its workers are woken through sockets")
async def test_the_socket_alone_wakes(quiet: Backend, database: Database) -> None:
    """One that does not notify does not look for commits of others either, and has its socket all the same."""
    await quiet.register_worker(new_worker(queues=["notes", "mails"]))
    with sending(database) as sender:
        async with quiet.wakeups(["notes"]) as hints:
            await sender.do("enqueue", "notes")
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")


@on_linux
@pytest.mark.sqlite_only("its workers are woken through sockets")
async def test_a_ring_is_a_hint_for_exactly_the_queues_of_the_worker(quiet: Backend) -> None:
    worker = await quiet.register_worker(new_worker(queues=["notes", "mails"]))
    async with listening(quiet, "other") as woken, quiet.wakeups(["notes", "mails", "other"]) as hints:
        presence.ring([worker.wakeup_address])
        heard = {(await asyncio.wait_for(anext(hints), 10)).queue for _ in range(2)}
        assert heard == {"notes", "mails"}
        assert not woken.done()
        await quiet.enqueue_many([new_job(queue="other")])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("other")


@on_linux
@pytest.mark.sqlite_only("its workers are woken through sockets")
async def test_the_address_that_a_worker_has_is_the_one_in_its_row(quiet: Backend, database: Database) -> None:
    worker = await quiet.register_worker(new_worker())
    assert worker.wakeup_address is not None
    assert database.query("SELECT wakeup_address FROM queue_workers") == [(worker.wakeup_address,)]


@on_linux
@pytest.mark.sqlite_only("its workers are woken through sockets")
async def test_a_worker_that_has_stopped_is_not_rung_for(quiet: Backend, database: Database) -> None:
    async with listening_to(database, quiet, "notes") as ears:
        ((worker,),) = database.query("SELECT id FROM queue_workers")
        with sending(database) as sender:
            await sender.do("enqueue", "notes")
            await sender.leave()
        assert ears.heard() == ["notes"]
        await quiet.forget_worker(worker)
        with sending(database) as sender:
            await sender.do("enqueue", "notes")
            await sender.leave()
        assert ears.heard() == []


_INSERT = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("INSERT INTO queue_pauses (queue, reason, paused_at) VALUES ('somewhere', NULL, 0)")
connection.commit()
connection.close()
"""


@pytest.mark.sqlite_only("a commit to the file is seen in the file")
async def test_a_commit_of_a_process_that_knows_nothing_of_us_wakes_too(
    store: Backend, database: SqliteDatabase, tmp_path: Path
) -> None:
    assert database.count("queue_workers") == 0
    async with store.wakeups(["notes"]) as hints:
        await asyncio.to_thread(output_of, "-c", _INSERT, database.path, cwd=tmp_path)
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")


@pytest.mark.sqlite_only("a commit to the file is seen in the file")
async def test_every_commit_to_the_file_is_seen_and_wakes_everybody(store: Backend, database: SqliteDatabase) -> None:
    async with store.wakeups(["notes"]) as notes, store.wakeups(["mails", "other"]) as others:
        for number in range(3):
            database.query("INSERT INTO queue_pauses (queue, paused_at) VALUES (?, 0)", f"somewhere {number}")
            assert await asyncio.wait_for(anext(notes), 10) == Wakeup("notes")
            heard = {(await asyncio.wait_for(anext(others), 10)).queue for _ in range(2)}
            assert heard == {"mails", "other"}


class Looks:
    """Counts how often the file is looked at."""

    def __init__(self, look: Callable[[object], int | None]) -> None:
        self._look = look
        self._made = asyncio.Semaphore(0)

    def __call__(self, connection: object) -> int | None:
        self._made.release()
        return self._look(connection)

    async def made(self, count: int) -> None:
        """Wait for so many more."""
        self._made = asyncio.Semaphore(0)
        for _ in range(count):
            await asyncio.wait_for(self._made.acquire(), 10)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    changes: Any = import_module("queue_core.backends.sqlite_changes")
    looks = Looks(changes._version)
    monkeypatch.setattr(changes, "_version", looks)
    return looks


@pytest.mark.sqlite_only("a commit to the file is seen in the file")
async def test_what_is_not_committed_yet_or_was_committed_before_wakes_nobody(
    store: Backend, database: SqliteDatabase, looks: Looks
) -> None:
    database.query("INSERT INTO queue_pauses (queue, paused_at) VALUES ('before', 0)")
    with closing(database.connect()) as connection:
        async with listening(store) as woken:
            connection.execute("INSERT INTO queue_pauses (queue, paused_at) VALUES ('after', 0)")
            await looks.made(3)
            assert not woken.done()
            connection.commit()
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


@pytest.mark.sqlite_only("a commit to the file is seen in the file")
async def test_nobody_looks_at_the_file_when_nobody_waits(store: Backend) -> None:
    assert _watchers() == 0
    async with store.wakeups(["notes"]):
        assert _watchers() == 1
        async with store.wakeups(["mails"]):
            assert _watchers() == 1
        assert _watchers() == 1
    assert _watchers() == 0
    async with store.wakeups(["notes"]):
        assert _watchers() == 1


@pytest.mark.sqlite_only("a commit to the file is seen in the file")
async def test_nobody_looks_at_the_file_for_one_who_could_not_begin_to_wait(
    store: Backend, database: SqliteDatabase
) -> None:
    folder = database.path.parent
    away = folder.rename(folder.with_name("away"))
    with suppress(sqlite3.OperationalError, BackendError):
        async with store.wakeups(["notes"]):
            pass
    away.rename(folder)
    async with store.wakeups(["notes"]):
        assert _watchers() == 1
    assert _watchers() == 0


def _watchers() -> int:
    return sum(task.get_name() == "queue-core watch" for task in asyncio.all_tasks())
