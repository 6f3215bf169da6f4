"""The part of the seam for operators who look. Nothing here writes or waits for a lock."""

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import func, literal, select

from queue_core.model import JobId, QueueCounts, QueueName, StoredJob

from .base import SqlBase
from .rows import stored_job


class Looking(SqlBase):
    """What operators need to see."""

    async def get(self, job_id: JobId) -> StoredJob | None:
        jobs = self._tables.jobs
        rows = await self._look(select(jobs).where(jobs.c.id == job_id))
        return stored_job(rows[0]) if rows else None

    async def counts(self) -> Mapping[QueueName, QueueCounts]:
        jobs, dead = self._tables.jobs, self._tables.dead_jobs
        count = func.count().label("count")
        # One statement, so that a job which is parked meanwhile is counted once.
        rows = await self._look(
            select(jobs.c.queue, jobs.c.status, count)
            .group_by(jobs.c.queue, jobs.c.status)
            .union_all(select(dead.c.queue, literal("dead"), count).group_by(dead.c.queue))
        )
        found: defaultdict[QueueName, dict[str, int]] = defaultdict(dict)
        for row in rows:
            found[row["queue"]][row["status"]] = row["count"]
        return {queue: QueueCounts(**counts) for queue, counts in sorted(found.items())}
