"""Upkeep and control on Postgres: the statements."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from queue_core.clock import Clock, to_microseconds
from queue_core.config import History
from queue_core.model import Claim, JobId, QueueName, Token, WorkerId

from .postgres_sql import PostgresSql, same_instant
from .rows import driver_job
from .statement import Call
from .steps import Rows, Steps
from .tables import Tables
from .taking_back import MISSING, OVERDUE, Abandoned

_STOP_WORKER = """
UPDATE {workers}
SET stopped_at = coalesce(CAST(:now AS timestamptz), clock_timestamp())
WHERE id = CAST(:worker AS uuid)
"""

# Without a lock: most of the time there is nothing to take, and this says so at the price of a read.
_IS_ABANDONED = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
)
SELECT 1
FROM clock
CROSS JOIN {jobs} AS jobs
LEFT JOIN {workers} AS workers ON workers.id = jobs.worker_id
WHERE jobs.status = 'claimed'
  AND jobs.queue = ANY(CAST(:queues AS text[]))
  AND (workers.lease_until < clock.now
       OR workers.stopped_at IS NOT NULL
       OR jobs.deadline_at < clock.now - CAST(:overdue AS bigint) * interval '1 microsecond'
       OR (workers.id IS NULL AND jobs.claimed_at < clock.now - CAST(:missing AS bigint) * interval '1 microsecond'))
LIMIT 1
"""

# The lock comes with a second look at the row as it is then: a beat that has committed meanwhile is seen. One that
# is under way holds the row, and its worker is passed over.
_LOCK_SILENT = """
SELECT CAST(workers.id AS text)
FROM {workers} AS workers
WHERE (workers.lease_until < coalesce(CAST(:now AS timestamptz), now()) OR workers.stopped_at IS NOT NULL)
  AND EXISTS (
      SELECT FROM {jobs} AS jobs
      WHERE jobs.status = 'claimed' AND jobs.worker_id = workers.id AND jobs.queue = ANY(CAST(:queues AS text[]))
  )
ORDER BY workers.id
LIMIT :limit
FOR UPDATE OF workers SKIP LOCKED
"""

_LOCK_DEAD = """
UPDATE {workers}
SET stopped_at = coalesce(stopped_at, CAST(:now AS timestamptz), clock_timestamp())
WHERE id IN (
    SELECT workers.id
    FROM {workers} AS workers
    WHERE workers.id = ANY(CAST(:workers AS uuid[]))
    ORDER BY workers.id
    FOR UPDATE SKIP LOCKED
)
RETURNING CAST(id AS text)
"""

# A job that is just being settled is locked, and is passed over: it does not need us.
_LOCK_ABANDONED = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
)
SELECT CAST(jobs.claim_token AS text),
       CASE WHEN jobs.worker_id <> ALL(CAST(:workers AS uuid[])) AND workers.id IS NULL THEN 'missing'
            WHEN jobs.worker_id <> ALL(CAST(:workers AS uuid[])) THEN 'overdue'
            WHEN workers.stopped_at IS NOT NULL THEN 'stopped'
            ELSE 'silent'
       END,
       jobs.cancel_requested_at IS NOT NULL,
       clock.now,
       jobs.id, jobs.job_type, jobs.queue, jobs.status, jobs.payload, jobs.priority, jobs.attempt, jobs.max_attempts,
       jobs.crashes, jobs.timeout, jobs.backoff, jobs.key, jobs.unique_key, jobs.tenant, jobs.context, jobs.headers,
       jobs.created_at, jobs.available_at, jobs.expires_at, jobs.claimed_at, jobs.deadline_at,
       CAST(jobs.worker_id AS text)
FROM clock
CROSS JOIN {jobs} AS jobs
LEFT JOIN {workers} AS workers ON workers.id = jobs.worker_id
WHERE jobs.status = 'claimed'
  AND jobs.queue = ANY(CAST(:queues AS text[]))
  AND (jobs.worker_id = ANY(CAST(:workers AS uuid[]))
       OR jobs.deadline_at < clock.now - CAST(:overdue AS bigint) * interval '1 microsecond'
       OR (workers.id IS NULL AND jobs.claimed_at < clock.now - CAST(:missing AS bigint) * interval '1 microsecond'))
ORDER BY jobs.id
LIMIT :limit
FOR UPDATE OF jobs SKIP LOCKED
"""

_PROMOTE = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
),
due AS MATERIALIZED (
    SELECT found.id
    FROM clock
    CROSS JOIN unnest(CAST(:queues AS text[])) AS wanted (queue)
    CROSS JOIN LATERAL (
        SELECT jobs.id
        FROM {jobs} AS jobs
        WHERE jobs.status = 'scheduled' AND jobs.queue = wanted.queue AND jobs.available_at <= clock.now
        ORDER BY jobs.available_at
        LIMIT :limit
        FOR UPDATE SKIP LOCKED
    ) AS found
    LIMIT :limit
)
UPDATE {jobs} AS jobs
SET status = 'pending'
WHERE jobs.id = ANY(ARRAY(SELECT due.id FROM due))
RETURNING jobs.queue
"""

_PRUNE_HISTORY = """
DELETE FROM {history}
WHERE id = ANY(ARRAY(
    SELECT old.id
    FROM {history} AS old
    WHERE old.finished_at < coalesce(CAST(:now AS timestamptz), now()) - CAST(:age AS bigint) * interval '1 microsecond'
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
))
RETURNING 1
"""

# A schedule's last tick stays: it says up to where the schedule has come.
_PRUNE_TICKS = """
DELETE FROM {ticks} AS ticks
USING (
    SELECT old.schedule, old.tick_at
    FROM {ticks} AS old
    WHERE old.fired_at < coalesce(CAST(:now AS timestamptz), now()) - CAST(:age AS bigint) * interval '1 microsecond'
      AND EXISTS (SELECT FROM {ticks} AS later WHERE later.schedule = old.schedule AND later.tick_at > old.tick_at)
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
) AS old
WHERE ticks.schedule = old.schedule AND ticks.tick_at = old.tick_at
RETURNING 1
"""

_PRUNE_WORKERS = """
DELETE FROM {workers}
WHERE id = ANY(ARRAY(
    SELECT old.id
    FROM {workers} AS old
    WHERE greatest(old.lease_until, old.stopped_at)
              < coalesce(CAST(:now AS timestamptz), now()) - CAST(:age AS bigint) * interval '1 microsecond'
      AND NOT EXISTS (SELECT FROM {jobs} AS jobs WHERE jobs.status = 'claimed' AND jobs.worker_id = old.id)
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
))
RETURNING lock_file
"""

_FIRE_TICK = """
INSERT INTO {ticks} (schedule, tick_at, fired_at)
VALUES (:schedule, :tick_at, coalesce(CAST(:now AS timestamptz), clock_timestamp()))
ON CONFLICT (schedule, tick_at) DO NOTHING
RETURNING 1
"""

_NOTE_TICK = """
UPDATE {ticks}
SET job_id = CAST(:job_id AS bigint)
WHERE schedule = :schedule AND tick_at = :tick_at
"""

_PAUSE = """
INSERT INTO {pauses} AS pauses (queue, reason, paused_at)
VALUES (:queue, :reason, coalesce(CAST(:now AS timestamptz), clock_timestamp()))
ON CONFLICT (queue) DO UPDATE
SET reason = excluded.reason
RETURNING pauses.xmax = 0
"""

_RESUME = """
DELETE FROM {pauses}
WHERE queue = :queue
RETURNING queue
"""

# The row is locked first: between a look and a write a worker could claim it, or give it back.
_CANCEL = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
),
target AS MATERIALIZED (
    SELECT jobs.id, jobs.status
    FROM {jobs} AS jobs
    WHERE jobs.id = CAST(:job_id AS bigint)
    FOR UPDATE
),
ended AS (
    DELETE FROM {jobs} AS jobs
    USING target
    WHERE jobs.id = target.id AND target.status <> 'claimed'
    RETURNING jobs.*
),
kept AS (
    INSERT INTO {history} (
        job_id, status, queue, job_type, priority, attempt, max_attempts, key, tenant, context, headers, payload,
        errors, created_at, available_at, finished_at
    )
    SELECT ended.id, 'cancelled', ended.queue, ended.job_type, ended.priority, ended.attempt, ended.max_attempts,
           ended.key, ended.tenant, ended.context, ended.headers, ended.payload, ended.errors, ended.created_at,
           ended.available_at, clock.now
    FROM ended, clock
    WHERE CAST(:keeps_all AS boolean) OR ended.queue = ANY(CAST(:kept AS text[]))
),
requested AS (
    UPDATE {jobs} AS jobs
    SET cancel_requested_at = coalesce(jobs.cancel_requested_at, clock.now)
    FROM target, clock
    WHERE jobs.id = target.id AND target.status = 'claimed'
)
SELECT target.status FROM target
"""


class PostgresUpkeep(PostgresSql):
    """The `UpkeepSql` of Postgres."""

    one_statement = True

    def __init__(self, tables: Tables, clock: Clock | None, history: History) -> None:
        super().__init__(tables, clock, history)
        self._limits = {"overdue": to_microseconds(OVERDUE), "missing": to_microseconds(MISSING)}
        self._stop_worker = self._statement(_STOP_WORKER)
        self._is_abandoned = self._statement(_IS_ABANDONED)
        self._lock_silent = self._statement(_LOCK_SILENT)
        self._lock_dead = self._statement(_LOCK_DEAD)
        self._lock_abandoned = self._statement(_LOCK_ABANDONED)
        self._promote = self._statement(_PROMOTE)
        self._prune_history = self._statement(_PRUNE_HISTORY)
        self._prune_ticks = self._statement(_PRUNE_TICKS)
        self._prune_workers = self._statement(_PRUNE_WORKERS)
        self._fire_tick = self._statement(_FIRE_TICK)
        self._note_tick = self._statement(_NOTE_TICK)
        self._pause = self._statement(_PAUSE)
        self._resume = self._statement(_RESUME)
        self._cancel = self._statement(_CANCEL)

    def stop_worker(self, worker: WorkerId) -> Call:
        return Call(self._stop_worker, {"now": self._now(), "worker": worker})

    def is_abandoned(self, queues: Collection[QueueName]) -> Call:
        return Call(self._is_abandoned, {"now": self._now(), "queues": list(queues), **self._limits})

    def lock_silent(self, queues: Collection[QueueName], limit: int) -> Call:
        return Call(self._lock_silent, {"now": self._now(), "queues": list(queues), "limit": limit})

    def lock_dead(self, workers: Collection[WorkerId]) -> Call:
        return Call(self._lock_dead, {"now": self._now(), "workers": list(workers)})

    def lock_abandoned(
        self, queues: Collection[QueueName], workers: Collection[WorkerId], limit: int, *, only_theirs: bool
    ) -> Call:
        parameters = {"now": self._now(), "queues": list(queues), "workers": list(workers), "limit": limit}
        # Nothing is older than NULL.
        limits = dict.fromkeys(self._limits) if only_theirs else self._limits
        return Call(self._lock_abandoned, {**parameters, **limits})

    def read_abandoned(self, rows: Rows) -> Sequence[Abandoned]:
        found: list[Abandoned] = []
        for token, cause, called_off, seen_at, *columns in rows:
            job = driver_job(columns, same_instant)
            found.append(Abandoned(job, Claim(job.id, Token(token)), cause, called_off, seen_at))
        return found

    def promote(self, queues: Collection[QueueName], limit: int) -> Call:
        return Call(self._promote, {"now": self._now(), "queues": list(queues), "limit": limit})

    def prune_history(self, age: timedelta, limit: int) -> Call:
        return Call(self._prune_history, self._old(age, limit))

    def prune_ticks(self, age: timedelta, limit: int) -> Call:
        return Call(self._prune_ticks, self._old(age, limit))

    def prune_workers(self, age: timedelta, limit: int) -> Call:
        return Call(self._prune_workers, self._old(age, limit))

    def _old(self, age: timedelta, limit: int) -> dict[str, Any]:
        return {"now": self._now(), "age": to_microseconds(age), "limit": limit}

    def fire_tick(self, schedule: str, tick_at: datetime) -> Call:
        return Call(self._fire_tick, {"now": self._now(), "schedule": schedule, "tick_at": tick_at})

    def note_tick(self, schedule: str, tick_at: datetime, job_id: JobId) -> Call:
        return Call(self._note_tick, {"schedule": schedule, "tick_at": tick_at, "job_id": job_id})

    def pause(self, queue: QueueName, reason: str | None) -> Steps[bool]:
        rows = yield Call(self._pause, {"now": self._now(), "queue": queue, "reason": reason})
        return bool(rows[0][0])

    def resume(self, queue: QueueName) -> Call:
        return Call(self._resume, {"queue": queue})

    def cancel(self, job_id: JobId) -> Steps[str | None]:
        rows = yield Call(self._cancel, {"now": self._now(), "job_id": job_id, **self._kept})
        return rows[0][0] if rows else None
