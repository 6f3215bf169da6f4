"""Several processes at one database: each job is claimed once and settled once, whoever stops in between.

The processes are `tests/support/racer.py`. What they did is read from ledgers that they keep, one each.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.model import JobId
from tests.support.children import Child, running
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.racer import QUEUES, TYPES, Race, read_ledger

ROOT = Path(__file__).parents[2]
SHORT_LEASE = 1.0


class Racer:
    """One of the processes, and its ledger."""

    def __init__(self, child: Child, ledger: Path) -> None:
        self._child = child
        self._ledger = ledger

    def go(self) -> None:
        self._child.hear("go")

    def says(self) -> str:
        return self._child.says()

    def has_stopped(self) -> bool:
        """Whether it has stopped itself; one that has ended instead never will."""
        how = os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert how is None or how.si_code == os.CLD_STOPPED, self.says()
        return how is not None

    def resume(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    def ends_well(self) -> None:
        assert self.says() == "done"
        how = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        assert how is not None
        assert (how.si_code, how.si_status) == (os.CLD_EXITED, 0)

    def claimed(self) -> Sequence[tuple[JobId, int]]:
        return read_ledger(self._ledger, "claimed")

    def settled(self) -> Sequence[tuple[JobId, int]]:
        return read_ledger(self._ledger, "settled")

    def enqueued(self) -> Sequence[JobId]:
        return [job_id for job_id, _ in read_ledger(self._ledger, "enqueued")]

    def holds(self) -> Sequence[JobId]:
        """What it has claimed and not settled, by its own account."""
        return sorted(job_id for job_id, _ in set(self.claimed()) - set(self.settled()))


class Track:
    """A database and a folder for the ledgers of those who race there."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._numbers = itertools.count(1)

    @contextmanager
    def racers(self, *tasks: dict[str, Any]) -> Generator[Sequence[Racer]]:
        """A process for each task, all of them ready to go."""
        with ExitStack() as stack:
            racers = [stack.enter_context(self._racer(task)) for task in tasks]
            for racer in racers:
                assert racer.says() == "ready"
            yield racers

    @contextmanager
    def _racer(self, task: dict[str, Any]) -> Generator[Racer]:
        number = next(self._numbers)
        ledger = self._folder / f"ledger {number}"
        race = Race(
            url=self._database.url, ledger=str(ledger), no_more=str(self._no_more), seed=20261118 + number, **task
        )
        command = (sys.executable, "-m", "tests.support.racer", msgspec.json.encode(race).decode())
        with running(*command, PYTHONPATH=str(ROOT)) as child:
            yield Racer(child, ledger)

    @property
    def _no_more(self) -> Path:
        return self._folder / "no more"

    def ends(self) -> None:
        """Nobody makes jobs any more: whoever finds none is done."""
        self._no_more.touch()


@pytest.fixture
async def store(engine: AsyncEngine) -> AsyncGenerator[Backend]:
    """The seam, with the time that the processes have."""
    store = connect(engine, QueueConfig(), None)
    await store.open(migrate=True)
    yield store
    await store.close()


@pytest.fixture
def track(store: Backend, database: Database, tmp_path: Path) -> Track:
    del store  # the tables are there
    return Track(database, tmp_path)


# All at once


async def test_four_processes_get_each_of_2000_jobs_exactly_once(
    store: Backend, database: Database, track: Track
) -> None:
    ids = await _enqueue(store, 2_000)
    track.ends()
    with track.racers({}, {}, {}, {}) as racers:
        _run_to_the_end(racers)
    claimed = _all(Racer.claimed, racers)
    assert sorted(claimed) == [(job_id, 1) for job_id in ids]
    for racer in racers:
        assert racer.settled() == racer.claimed()
    assert database.count() == 0


async def test_four_processes_settle_mixed_batches_and_each_attempt_happens_once(
    store: Backend, database: Database, track: Track
) -> None:
    ids = {job_type: await _enqueue(store, 500, job_type=job_type) for job_type in TYPES}
    track.ends()
    with track.racers({}, {}, {}, {}) as racers:
        _run_to_the_end(racers)
    twice = [(job_id, attempt) for job_id in (*ids["Flaky"], *ids["Doomed"]) for attempt in (1, 2)]
    assert sorted(_all(Racer.claimed, racers)) == sorted([*((job_id, 1) for job_id in ids["Steady"]), *twice])
    for racer in racers:
        assert racer.settled() == racer.claimed()
    assert database.count() == 0
    dead = sorted(database.query("SELECT job_id, failure_count FROM queue_dead_jobs"))
    assert dead == [(job_id, 2) for job_id in ids["Doomed"]]


async def test_what_two_processes_make_two_others_get_exactly_once(database: Database, track: Track) -> None:
    with track.racers({"makes": 1_000}, {"makes": 1_000}, {}, {}) as racers:
        for racer in racers:
            racer.go()
        makers, takers = racers[:2], racers[2:]
        for maker in makers:
            maker.ends_well()
        track.ends()
        for taker in takers:
            taker.ends_well()
    enqueued = [job_id for maker in makers for job_id in maker.enqueued()]
    assert len(enqueued) == len(set(enqueued)) == 2_000
    claimed = _all(Racer.claimed, takers)
    assert sorted(job_id for job_id, attempt in claimed if attempt == 1) == sorted(enqueued)
    assert max(Counter(claimed).values()) == 1
    for taker in takers:
        assert taker.settled() == taker.claimed()
    assert database.count() == 0


# One is stopped, between a claim and its settle: inside a write transaction it would keep all writers of SQLite waiting


async def test_a_process_that_was_stopped_for_a_while_settles_what_it_held(
    store: Backend, database: Database, track: Track
) -> None:
    with track.racers({"stops_at": 2}, {}, {}, {}) as racers:
        stopped, *others = racers
        ids = await _start_and_wait_for_the_stop(store, database, track, racers)
        await _until(lambda: _left(database) == stopped.holds())
        stopped.resume()
        count = len(stopped.holds())
        assert stopped.says() == f"settled {count} of {count}"
        for racer in (stopped, *others):
            racer.ends_well()
    assert sorted(_all(Racer.claimed, racers)) == [(job_id, 1) for job_id in ids]
    for racer in racers:
        assert racer.settled() == racer.claimed()
    assert database.count() == 0


async def test_a_process_that_was_stopped_past_its_lease_settles_nothing_that_others_have_run(
    store: Backend, database: Database, track: Track
) -> None:
    with track.racers({"stops_at": 2, "lease": SHORT_LEASE}, {}, {}, {}) as racers:
        stopped, *others = racers
        ids = await _start_and_wait_for_the_stop(store, database, track, racers)
        await _until(lambda: _left(database) == stopped.holds())
        stale = stopped.holds()
        await _reap(store, stale)
        for racer in others:
            racer.ends_well()
        assert database.count() == 0
        stopped.resume()
        assert stopped.says() == f"settled 0 of {len(stale)}"
        stopped.ends_well()
    assert stopped.holds() == stale
    assert sorted(job_id for job_id, _ in _all(Racer.settled, racers)) == ids
    assert sorted(_all(Racer.claimed, racers)) == sorted(
        [*((job_id, 1) for job_id in ids), *((each, 2) for each in stale)]
    )


async def test_a_process_that_was_stopped_past_its_lease_settles_nothing_that_another_runs(
    store: Backend, database: Database, track: Track
) -> None:
    ids = await _enqueue(store, 20)
    track.ends()
    with track.racers({"stops_at": 1, "room": 20, "lease": SHORT_LEASE}, {"stops_at": 1, "room": 20}) as (
        stopped,
        other,
    ):
        stopped.go()
        await _until(stopped.has_stopped)
        await _reap(store, ids)
        other.go()
        await _until(other.has_stopped)
        running_now = database.jobs("id, status, attempt, worker_id, claim_token, deadline_at")
        stopped.resume()
        assert stopped.says() == "settled 0 of 20"
        assert database.jobs("id, status, attempt, worker_id, claim_token, deadline_at") == running_now
        other.resume()
        assert other.says() == "settled 20 of 20"
        stopped.ends_well()
        other.ends_well()
    assert sorted(stopped.claimed()) == [(job_id, 1) for job_id in ids]
    assert sorted(other.claimed()) == sorted(other.settled()) == [(job_id, 2) for job_id in ids]
    assert stopped.settled() == []
    assert database.count() == 0


# Helpers


def _run_to_the_end(racers: Sequence[Racer]) -> None:
    for racer in racers:
        racer.go()
    for racer in racers:
        racer.ends_well()


async def _start_and_wait_for_the_stop(
    store: Backend, database: Database, track: Track, racers: Sequence[Racer]
) -> Sequence[JobId]:
    """Let them race until the first of them has stopped itself; the jobs do not run out before. Returns all jobs."""
    ids = [*await _enqueue(store, 2_000)]
    for racer in racers:
        racer.go()
    stopped = racers[0]
    while not stopped.has_stopped():
        if database.count() < 200:
            ids += await _enqueue(store, 200)
        await asyncio.sleep(0.005)
    track.ends()
    return sorted(ids)


async def _enqueue(store: Backend, count: int, *, job_type: str = "Steady") -> Sequence[JobId]:
    dice = random.Random(count)
    jobs = [new_job(queue=dice.choice(QUEUES), job_type=job_type) for _ in range(count)]
    return [each.job_id for each in await store.enqueue_many(jobs)]


async def _reap(store: Backend, ids: Sequence[JobId]) -> None:
    """Until the lease of whoever holds these jobs has run out and they are taken back, and no others."""
    taken: list[JobId] = []
    while len(taken) < len(ids):
        taken += (await store.reap(QUEUES, limit=1_000)).requeued
        await asyncio.sleep(0.02)
    assert sorted(taken) == ids


async def _until(state: Callable[[], bool]) -> None:
    """Until something is so."""
    for _ in range(6_000):
        if state():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


def _left(database: Database) -> Sequence[JobId]:
    return [job_id for (job_id,) in database.jobs("id")]


def _all(of: Callable[[Racer], Sequence[tuple[JobId, int]]], racers: Sequence[Racer]) -> Sequence[tuple[JobId, int]]:
    return [line for racer in racers for line in of(racer)]
