"""A process that races others for jobs, or makes them, and writes down in a ledger what it got.

`python -m tests.support.racer '{"url": …}'`. It says `ready` and waits for a line. A worker then claims and settles
until nobody makes jobs any more and none is left; the type of a job decides how its attempts end. Every job
claimed, settled or enqueued is a line of a file that no other process writes: what happened is read from there, and
not from the queue's own tables. It says `done` at its end, or what went wrong.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from msgspec import Struct, json
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.liveness import new_worker
from queue_core.model import ClaimedJob, JobId, Outcome, Parked, Retried, Succeeded
from tests.support.jobs import new_job
from tests.support.store import failure, new_token

QUEUES: Sequence[str] = ("notes", "mails")
TYPES: Sequence[str] = ("Steady", "Flaky", "Doomed")
"""Succeeds; fails at its first attempt and then succeeds; fails twice and is then given up."""

_LARGEST_BATCH = 50
_LOOK_EVERY = 0.005


class Race(Struct, frozen=True, kw_only=True):
    """What one process is to do."""

    url: str
    ledger: str
    no_more: str
    """A file: when it is there, nobody makes jobs any more."""
    seed: int
    lease: float = 600.0
    room: int | None = None
    """How many it always claims of each queue; without, a random number up to 50 in all."""
    stops_at: int | None = None
    """It stops itself between this claim (the first is 1) and its settle; afterwards it says what it settled."""
    makes: int = 0
    """It makes so many jobs, and claims none."""


class Ledger:
    """Lines of three words: what was done, to which job, at which attempt."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, what: str, jobs: Iterable[tuple[JobId, int]]) -> None:
        for job_id, attempt in jobs:
            os.write(self._file, f"{what} {job_id} {attempt}\n".encode())


def read_ledger(path: Path, what: str) -> Sequence[tuple[JobId, int]]:
    """The jobs and attempts that this was done to, in the order in which it was."""
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(JobId(int(job_id)), int(attempt)) for done, job_id, attempt in words if done == what]


def main() -> None:
    try:
        asyncio.run(_race(json.decode(sys.argv[1], type=Race)))
    except BaseException as error:
        _say(f"{type(error).__name__}: {error}")
        raise
    _say("done")


async def _race(race: Race) -> None:
    engine = create_async_engine(race.url)
    backend = connect(engine, QueueConfig(), None)
    await backend.open(migrate=False)
    try:
        await (_make(race, backend) if race.makes else _drain(race, backend))
    finally:
        await backend.close()
        await engine.dispose()


async def _make(race: Race, backend: Backend) -> None:
    dice, ledger = random.Random(race.seed), Ledger(Path(race.ledger))
    _wait_for_the_start()
    left = race.makes
    while left:
        size = min(left, dice.randint(1, 20))
        jobs = [new_job(queue=dice.choice(QUEUES), job_type=dice.choice(TYPES)) for _ in range(size)]
        ledger.note("enqueued", [(each.job_id, 0) for each in await backend.enqueue_many(jobs)])
        left -= size


async def _drain(race: Race, backend: Backend) -> None:
    dice, ledger = random.Random(race.seed), Ledger(Path(race.ledger))
    lease = timedelta(seconds=race.lease)
    worker = await backend.register_worker(new_worker(queues=QUEUES, job_types=TYPES, lease=lease, version="0"))
    _wait_for_the_start()
    batches = 0
    while True:
        is_the_end = Path(race.no_more).exists()  # noqa: ASYNC240 nothing else runs here
        wanted = _rooms(dice) if race.room is None else dict.fromkeys(QUEUES, race.room)
        jobs = (await backend.claim(worker, new_token(), wanted, TYPES)).jobs
        if jobs:
            batches += 1
            await _run(jobs, backend, ledger, stops=batches == race.stops_at)
        elif is_the_end and await _is_empty(backend):
            return
        else:
            await asyncio.sleep(_LOOK_EVERY)


def _rooms(dice: random.Random) -> dict[str, int]:
    size = dice.randint(1, _LARGEST_BATCH)
    first = dice.randint(0, size)
    return dict(zip(QUEUES, (first, size - first), strict=True))


async def _run(jobs: Sequence[ClaimedJob], backend: Backend, ledger: Ledger, *, stops: bool) -> None:
    ledger.note("claimed", [(job.claim.job_id, job.attempt) for job in jobs])
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    settled = await backend.settle([_outcome(job) for job in jobs])
    ledger.note("settled", [(job.claim.job_id, job.attempt) for job in jobs if job.claim.job_id in settled])
    if stops:
        _say(f"settled {len(settled)} of {len(jobs)}")


def _outcome(job: ClaimedJob) -> Outcome:
    match job.job_type, job.attempt:
        case (("Flaky" | "Doomed"), 1):
            return Retried(job.claim, failure(attempt=1), timedelta(0))
        case "Doomed", attempt:
            return Parked(job.claim, failure(attempt=attempt), "it failed twice")
        case _:
            return Succeeded(job.claim)


async def _is_empty(backend: Backend) -> bool:
    return not any(each.scheduled or each.pending or each.claimed for each in (await backend.counts()).values())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _wait_for_the_start() -> None:
    _say("ready")
    sys.stdin.readline()


if __name__ == "__main__":
    main()
