"""A worker's calls, cut short at any moment: no claim that nobody knows of, nothing by halves, no lock left behind."""

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import pytest

from queue_core import BackendError
from queue_core.backend import Backend
from queue_core.model import ClaimedJob, JobId, Worker
from tests.conformance.test_cancellation import Call, Way
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import LEASE, claim, enqueue, knowing, new_token, new_worker, one_of_each

LONGEST_DELAY = 0.004
JOBS = 12

Row: TypeAlias = tuple[JobId, str, int, int, str | None]
"""Of a job: id, status, attempt, crashes, token."""


class Onlooker:
    """A plain connection of its own, which waits for nobody's lock."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect()
        if database.kind == "sqlite":
            self._connection.isolation_level = None
            self._connection.execute("PRAGMA busy_timeout = 200")
        else:
            self._connection.autocommit = True
            self._connection.execute("SET lock_timeout = '200ms'")

    def close(self) -> None:
        self._connection.close()

    def jobs(self) -> Sequence[Row]:
        found = self._connection.execute("SELECT id, status, attempt, crashes, claim_token FROM queue_jobs ORDER BY id")
        return [(*row, None if token is None else str(token)) for *row, token in found.fetchall()]

    def dead(self) -> set[JobId]:
        return {job_id for (job_id,) in self._connection.execute("SELECT job_id FROM queue_dead_jobs").fetchall()}

    def write(self) -> None:
        """Write to every row that a call may have locked; fails when a lock was left behind."""
        self._connection.execute("UPDATE queue_jobs SET priority = priority")
        self._connection.execute("UPDATE queue_workers SET pid = pid")

    def put_back(self) -> None:
        """Make every job what it was before anybody claimed it."""
        self._connection.execute(
            "UPDATE queue_jobs SET status = 'pending', attempt = 0, crashes = 0, worker_id = NULL, claim_token = NULL,"
            " claimed_at = NULL, deadline_at = NULL, errors = NULL"
        )


@pytest.fixture
def onlooker(backend: Backend, database: Database) -> Generator[Onlooker]:
    del backend  # the tables are there
    onlooker = Onlooker(database)
    yield onlooker
    onlooker.close()


@pytest.fixture(autouse=True)
def garbage_stays() -> Generator[None]:
    """The collector would free a lock that was left behind, and so hide it."""
    gc.disable()
    yield
    gc.enable()


async def cancelled_in_between(way: Way, awaited: Awaitable[object], dice: random.Random) -> None:
    """Let it begin, cancel it at some moment, sometimes twice, and wait for its end."""
    call = Call(way, awaited)
    await asyncio.sleep(dice.random() * LONGEST_DELAY)
    call.cancel()
    if dice.random() < 0.3:
        await asyncio.sleep(dice.random() * LONGEST_DELAY / 2)
        call.cancel()
    await call.end()
    assert call.task.cancelled() or call.task.exception() is None


# Cancelled


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_a_cancelled_claim_leaves_nothing_claimed_that_its_caller_did_not_get(
    backend: Backend, clock: ManualClock, onlooker: Onlooker, way: Way
) -> None:
    dice = random.Random(20261118)
    ids = await enqueue(backend, *(new_job() for _ in range(JOBS)))
    worker = new_worker()
    for _ in range(500):
        token = new_token()
        got: list[ClaimedJob] = []

        async def claiming(token: Any = token, got: list[ClaimedJob] = got, room: int = dice.randint(1, 3)) -> None:
            got += (await backend.claim(worker, token, {"notes": room}, ["Note"])).jobs

        clock.advance(LEASE)  # so that the worker's row is written too
        await cancelled_in_between(way, claiming(), dice)
        taken = {job.claim.job_id for job in got}
        assert onlooker.jobs() == [
            (job_id, "claimed", 1, 0, token) if job_id in taken else (job_id, "pending", 0, 0, None) for job_id in ids
        ]
        onlooker.write()
        onlooker.put_back()
    assert [(job.claim.job_id, job.attempt) for job in await claim(backend, worker, JOBS)] == [
        (job_id, 1) for job_id in ids
    ]


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_a_claim_that_was_sent_outlasts_its_cancellation(
    backend: Backend, clock: ManualClock, database: Database, onlooker: Onlooker, way: Way
) -> None:
    """Were it abandoned, the server could still carry it out after what it took was given back."""
    ids = await enqueue(backend, new_job(), new_job())
    worker, token = await backend.register_worker(new_worker()), new_token()
    got: list[ClaimedJob] = []

    async def claiming() -> None:
        got.extend((await backend.claim(worker, token, {"notes": 2}, ["Note"])).jobs)

    clock.advance(LEASE)
    with closing(database.connect()) as holder:
        # The row that the claim renews, and on SQLite the whole file.
        holder.execute("UPDATE queue_workers SET pid = pid")
        call = Call(way, claiming())
        await is_waiting(database, "queue-core claim")
        call.cancel()
        for _ in range(200):
            await backend.counts()  # others are served; an abandoned claim would be over long before
        assert not call.task.done(), "the caller went away, and nobody knows what became of the claim"
        holder.rollback()
        await call.end()
    taken = {job.claim.job_id for job in got}
    assert onlooker.jobs() == [
        (job_id, "claimed", 1, 0, token) if job_id in taken else (job_id, "pending", 0, 0, None) for job_id in ids
    ]


async def is_waiting(database: Database, task: str) -> None:
    """Until the call has been sent, and waits in the database for the transaction that is in its way."""
    for _ in range(2_000):
        await asyncio.sleep(0.001)
        if database.kind == "sqlite":
            if any(each.get_name() == task for each in asyncio.all_tasks()):
                return
        elif database.query(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        ):
            return
    raise AssertionError("the call never came to wait")


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_a_cancelled_settle_is_carried_out_whole(backend: Backend, onlooker: Onlooker, way: Way) -> None:
    dice = random.Random(20261118)
    outcomes = one_of_each(now=False)
    await enqueue(backend, *(new_job() for _ in range(100 * len(outcomes))))
    for _ in range(100):
        jobs = dict(zip(outcomes, await claim(backend, new_worker(), len(outcomes)), strict=True))
        ids = {name: job.claim.job_id for name, job in jobs.items()}
        batch = [outcomes[name](job.claim) for name, job in jobs.items()]
        dice.shuffle(batch)
        await cancelled_in_between(way, backend.settle(batch), dice)
        assert [row for row in onlooker.jobs() if row[0] in ids.values()] == [
            (ids["retried"], "scheduled", 1, 0, None),
            (ids["snoozed"], "scheduled", 0, 0, None),
            (ids["released"], "pending", 0, 0, None),
        ]
        assert ids["parked"] in onlooker.dead()
        onlooker.write()


async def _beat(backend: Backend, worker: Worker) -> None:
    await backend.beat(worker, knowing([], []))


async def _reap(backend: Backend, worker: Worker) -> None:
    await backend.reap(["notes"], limit=JOBS)


async def _sweep(backend: Backend, worker: Worker) -> None:
    await backend.sweep_orphans(["notes"], [worker.id], park=False, limit=JOBS)


@pytest.mark.parametrize("way", ["native", "anyio"])
@pytest.mark.parametrize(
    ("call", "attempt", "crashes"), [(_beat, 0, 0), (_reap, 1, 1), (_sweep, 1, 1)], ids=["beat", "reap", "sweep"]
)
async def test_a_cancelled_look_after_claims_takes_all_or_none_and_leaves_no_lock(
    backend: Backend,
    clock: ManualClock,
    onlooker: Onlooker,
    way: Way,
    call: Callable[[Backend, Worker], Awaitable[None]],
    attempt: int,
    crashes: int,
) -> None:
    dice = random.Random(20261118)
    ids = await enqueue(backend, *(new_job() for _ in range(JOBS)))
    for _ in range(50):
        worker = new_worker()
        token = (await claim(backend, worker, JOBS))[0].claim.token
        clock.advance(LEASE + timedelta(seconds=1))
        await cancelled_in_between(way, call(backend, worker), dice)
        taken_back = [(job_id, "pending", attempt, crashes, None) for job_id in ids]
        untouched = [(job_id, "claimed", 1, 0, token) for job_id in ids]
        # A reap looks first, and may be cancelled before it writes.
        assert onlooker.jobs() in ([taken_back, untouched] if call is _reap else [taken_back])
        onlooker.write()
        onlooker.put_back()
    assert len(await claim(backend, new_worker(), JOBS)) == JOBS


# Refused in the middle


@contextmanager
def refusing(database: Database, event: str, table: str) -> Generator[None]:
    """A rule that the application added to one of our tables."""
    if database.kind == "sqlite":
        action = "BEGIN SELECT RAISE(ABORT, 'not here'); END"
    else:
        database.query(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''not here''; END'"
        )
        action = "FOR EACH ROW EXECUTE FUNCTION refuse()"
    database.query(f"CREATE TRIGGER refused BEFORE {event} ON {table} {action}")
    try:
        yield
    finally:
        if database.kind == "sqlite":
            database.query("DROP TRIGGER refused")
        else:
            database.query("DROP FUNCTION refuse CASCADE")


async def test_a_claim_that_can_not_end_an_expired_job_has_claimed_nothing(
    backend: Backend, clock: ManualClock, database: Database, onlooker: Onlooker
) -> None:
    """Else a job that expired before its first start would have an attempt behind it, and would be run."""
    ids = await enqueue(backend, new_job(), new_job(expires_after=LEASE), new_job())
    worker = new_worker()
    clock.advance(LEASE)
    with refusing(database, "DELETE", "queue_jobs"):
        with pytest.raises(BackendError, match="not here"):
            await claim(backend, worker, JOBS)
        assert onlooker.jobs() == [(job_id, "pending", 0, 0, None) for job_id in ids]
        onlooker.write()
    assert [job.claim.job_id for job in await claim(backend, worker, JOBS)] == [ids[0], ids[2]]
    assert len(onlooker.jobs()) == 2


async def test_a_settle_that_can_not_park_one_job_has_settled_none(
    backend: Backend, database: Database, onlooker: Onlooker
) -> None:
    outcomes = one_of_each()
    await enqueue(backend, *(new_job() for _ in outcomes))
    jobs = await claim(backend, new_worker(), len(outcomes))
    batch = [end(job.claim) for end, job in zip(outcomes.values(), jobs, strict=True)]
    before = onlooker.jobs()
    with refusing(database, "INSERT", "queue_dead_jobs"):
        with pytest.raises(BackendError, match="not here"):
            await backend.settle(batch)
        assert onlooker.jobs() == before
        onlooker.write()
    assert await backend.settle(batch) == {job.claim.job_id for job in jobs}
