"""The worker's part of the seam: claim, settle, extend, beat, next_due.

A claim registers its rows under a token that the caller made. When the answer to it is lost, the token
finds them: the repetition looks for rows of that token before it takes any. When the caller is cancelled
meanwhile, nobody would know of them: they are given back. Whatever slips through both (a statement that the
server finishes after we have looked) the next beat finds and releases.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Final, Protocol

from sqlalchemy import select

from queue_core.errors import BackendError
from queue_core.model import (
    Beat,
    Claim,
    Claimed,
    ClaimedJob,
    JobId,
    JobTypeName,
    Known,
    Outcome,
    QueueName,
    Released,
    Retried,
    Snoozed,
    Token,
    Worker,
    WorkerId,
)
from queue_core.shield import finish

from .base import Doubt, SqlBase
from .beating import BeatSql, beat
from .claiming import Taken
from .rows import in_claim_order
from .settlement import Settlement, SettleSql
from .statement import Call
from .steps import Steps

_MOST_ROUNDS: Final = 100


class ClaimSql(BeatSql, Protocol):
    """A dialect's statements."""

    one_statement: bool
    """Whether a claim is a single statement, and so a transaction by itself."""

    def register_worker(self, worker: Worker) -> Call: ...

    def claim(
        self, worker: Worker, token: Token, wanted: Mapping[QueueName, int], job_types: Collection[JobTypeName]
    ) -> Steps[Taken]: ...

    def find_claimed(self, worker: WorkerId, token: Token) -> Steps[Sequence[ClaimedJob]]: ...

    def give_back(self, worker: WorkerId, token: Token) -> Call:
        """Release all rows of a token; gives the queue of each."""
        ...

    def extend(self, claims: Sequence[Claim], timeout: timedelta) -> Call: ...

    def next_due(self, queues: Collection[QueueName]) -> Call:
        """Gives one row: microseconds until then, negative when overdue, NULL when there is none."""
        ...


class Storing(SqlBase):
    """What a worker needs."""

    _claim_sql: ClaimSql
    _settle_sql: SettleSql

    # Claiming

    async def claim(
        self,
        worker: Worker,
        token: Token,
        wanted: Mapping[QueueName, int],
        job_types: Collection[JobTypeName],
    ) -> Claimed:
        rooms = {queue: room for queue, room in wanted.items() if room > 0}
        if not rooms or not job_types or not await self._may_find(rooms, job_types):
            return Claimed()
        try:
            claiming = self._claim(worker, token, rooms, list(dict.fromkeys(job_types)))
            return await finish(claiming, name="queue-core claim", among=self._writing)
        except asyncio.CancelledError:
            with suppress(BackendError):  # the beat releases what nobody knows of
                await self._give_back(worker.id, token)
            raise

    async def _may_find(self, wanted: Mapping[QueueName, int], job_types: Collection[JobTypeName]) -> bool:
        """Whether a claim is worth its price; for where even an empty one has a price."""
        return True

    async def _claim(
        self, worker: Worker, token: Token, rooms: Mapping[QueueName, int], job_types: Collection[JobTypeName]
    ) -> Claimed:
        jobs: list[ClaimedJob] = []
        ended = 0
        rounds = deque([job_types])
        # Not for ever: whoever has ended many jobs and claimed none comes again.
        for _ in range(_MOST_ROUNDS):
            left = _left(rooms, jobs)
            if not rounds or not left:
                break
            types = rounds.popleft()
            taken = await self._claim_once(worker, token, left, types, known={job.claim.job_id for job in jobs})
            jobs += taken.jobs
            ended += taken.ended
            if taken.ended:
                # They have taken the place of others that can be run.
                rounds.appendleft(types)
            elif taken.is_short and len(types) > 1:
                rounds.extend([job_type] for job_type in types)
        return Claimed(in_claim_order(jobs), ended)

    async def _claim_once(
        self,
        worker: Worker,
        token: Token,
        rooms: Mapping[QueueName, int],
        job_types: Collection[JobTypeName],
        known: Collection[JobId],
    ) -> Taken:
        tries = 0

        async def run(deadline: float) -> Taken:
            nonlocal tries
            tries += 1
            if tries > 1:
                # The answer to the last try was lost, and perhaps only the answer.
                looking = self._claim_sql.find_claimed(worker.id, token)
                found = await self._run(looking, deadline, transaction=False)
                if lost := [job for job in found if job.claim.job_id not in known]:
                    return Taken(lost)
            claiming = self._claim_sql.claim(worker, token, rooms, job_types)
            return await self._run(claiming, deadline, transaction=not self._claim_sql.one_statement)

        return await self._repeat(run)

    async def _give_back(self, worker: WorkerId, token: Token) -> None:
        rows = await self._call(partial(self._claim_sql.give_back, worker, token), name="give back")
        self._announce(frozenset(row[0] for row in rows))

    # Settling

    async def settle(self, outcomes: Sequence[Outcome], *, repeated: bool = False) -> frozenset[JobId]:
        if not outcomes:
            return frozenset()
        settlement, doubt = Settlement(outcomes), Doubt(repeated)
        settled = await self._perform(
            partial(settlement.steps, self._settle_sql),
            name="settle",
            transaction=not (settlement.is_one_group and self._settle_sql.one_statement),
            doubt=doubt,
        )
        self._announce(settled.woken)
        return settled.jobs | await self._settled_before(outcomes) if doubt.is_there else settled.jobs

    async def _settled_before(self, outcomes: Sequence[Outcome]) -> frozenset[JobId]:
        """Of outcomes whose answer was lost once: those that an earlier try may have recorded.

        Where it left no row there is none to find now. A job that goes again may have been claimed by others since.
        """
        jobs = self._tables.jobs
        ids = [outcome.claim.job_id for outcome in outcomes]
        live = {row["id"] for row in await self._look(select(jobs.c.id).where(jobs.c.id.in_(ids)))}
        again = Retried | Snoozed | Released
        return frozenset(
            outcome.claim.job_id
            for outcome in outcomes
            if outcome.claim.job_id not in live or isinstance(outcome, again)
        )

    async def extend(self, claims: Collection[Claim], timeout: timedelta) -> frozenset[JobId]:
        if not claims:
            return frozenset()
        rows = await self._call(partial(self._claim_sql.extend, list(claims), timeout), name="extend")
        return frozenset(row[0] for row in rows)

    # Living

    async def beat(self, worker: Worker, known: Callable[[], Known]) -> Beat:
        doubt = Doubt()
        steps = partial(beat, self._claim_sql, worker, known)
        beaten = await self._perform(steps, name="beat", transaction=True, doubt=doubt)
        self._announce(frozenset(worker.queues) if doubt.is_there else beaten.woken)
        return beaten.beat

    async def next_due(self, queues: Collection[QueueName]) -> timedelta | None:
        if not queues:
            return None
        rows = await self._call(partial(self._claim_sql.next_due, queues), name="next due")
        wait: int | None = rows[0][0]
        return None if wait is None else timedelta(microseconds=max(wait, 0))


def _left(rooms: Mapping[QueueName, int], jobs: Sequence[ClaimedJob]) -> Mapping[QueueName, int]:
    """The room that is left in each queue, where there is any."""
    taken = Counter(job.queue for job in jobs)
    return {queue: room - taken[queue] for queue, room in rooms.items() if room > taken[queue]}
