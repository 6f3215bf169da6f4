"""Upkeep and control on SQLite: the statements."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from queue_core.clock import Clock, instant, to_microseconds
from queue_core.config import History
from queue_core.model import Claim, JobId, QueueName, Token, WorkerId

from .rows import driver_job
from .sqlite_sql import SqliteSql, as_json
from .statement import Call
from .steps import Rows, Steps
from .taking_back import MISSING, OVERDUE, Abandoned

_STOP_WORKER = """
UPDATE queue_workers
SET stopped_at = :now
WHERE id = :worker
"""

# Without a transaction: most of the time there is nothing to take, and this says so without the write lock.
_IS_ABANDONED = """
SELECT 1
FROM queue_jobs AS jobs INDEXED BY queue_jobs_claimed
LEFT JOIN queue_workers AS workers ON workers.id = jobs.worker_id
WHERE jobs.status = 'claimed'
  AND jobs.queue IN (SELECT value FROM json_each(:queues))
  AND (workers.lease_until < :now
       OR workers.stopped_at IS NOT NULL
       OR jobs.deadline_at < :overdue
       OR (workers.id IS NULL AND jobs.claimed_at < :missing))
LIMIT 1
"""

# The transaction is the only writer, so that nothing needs a lock of its own here.
_LOCK_SILENT = """
SELECT workers.id
FROM queue_workers AS workers
WHERE (workers.lease_until < :now OR workers.stopped_at IS NOT NULL)
  AND EXISTS (
      SELECT 1 FROM queue_jobs AS jobs
      WHERE jobs.status = 'claimed'
        AND jobs.worker_id = workers.id
        AND jobs.queue IN (SELECT value FROM json_each(:queues))
  )
LIMIT :limit
"""

_LOCK_DEAD = """
UPDATE queue_workers
SET stopped_at = coalesce(stopped_at, :now)
WHERE id IN (SELECT value FROM json_each(:workers))
RETURNING id
"""

_LOCK_ABANDONED = """
SELECT jobs.claim_token,
       CASE WHEN jobs.worker_id NOT IN (SELECT value FROM json_each(:workers)) AND workers.id IS NULL THEN 'missing'
            WHEN jobs.worker_id NOT IN (SELECT value FROM json_each(:workers)) THEN 'overdue'
            WHEN workers.stopped_at IS NOT NULL THEN 'stopped'
            ELSE 'silent'
       END,
       jobs.cancel_requested_at IS NOT NULL,
       jobs.id, jobs.job_type, jobs.queue, jobs.status, jobs.payload, jobs.priority, jobs.attempt, jobs.max_attempts,
       jobs.crashes, jobs.timeout, jobs.backoff, jobs."key", jobs.unique_key, jobs.tenant, jobs.context, jobs.headers,
       jobs.created_at, jobs.available_at, jobs.expires_at, jobs.claimed_at, jobs.deadline_at, jobs.worker_id
FROM queue_jobs AS jobs INDEXED BY queue_jobs_claimed
LEFT JOIN queue_workers AS workers ON workers.id = jobs.worker_id
WHERE jobs.status = 'claimed'
  AND jobs.queue IN (SELECT value FROM json_each(:queues))
  AND (jobs.worker_id IN (SELECT value FROM json_each(:workers))
       OR jobs.deadline_at < :overdue
       OR (workers.id IS NULL AND jobs.claimed_at < :missing))
LIMIT :limit
"""

_PROMOTE = """
UPDATE queue_jobs
SET status = 'pending'
WHERE id IN (
    SELECT jobs.id
    FROM json_each(:queues) AS wanted
    CROSS JOIN queue_jobs AS jobs INDEXED BY queue_jobs_scheduled
    WHERE jobs.status = 'scheduled' AND jobs.queue = wanted.value AND jobs.available_at <= :now
    LIMIT :limit
)
RETURNING queue
"""

_PRUNE_HISTORY = """
DELETE FROM queue_history
WHERE id IN (SELECT old.id FROM queue_history AS old WHERE old.finished_at < :before LIMIT :limit)
RETURNING 1
"""

# A schedule's last tick stays: it says up to where the schedule has come.
_PRUNE_TICKS = """
DELETE FROM queue_ticks
WHERE rowid IN (
    SELECT old.rowid
    FROM queue_ticks AS old
    WHERE old.fired_at < :before
      AND EXISTS (
          SELECT 1 FROM queue_ticks AS later WHERE later.schedule = old.schedule AND later.tick_at > old.tick_at
      )
    LIMIT :limit
)
RETURNING 1
"""

_PRUNE_WORKERS = """
DELETE FROM queue_workers
WHERE id IN (
    SELECT old.id
    FROM queue_workers AS old
    WHERE max(old.lease_until, coalesce(old.stopped_at, 0)) < :before
      AND NOT EXISTS (SELECT 1 FROM queue_jobs AS jobs WHERE jobs.status = 'claimed' AND jobs.worker_id = old.id)
    LIMIT :limit
)
RETURNING lock_file
"""

_FIRE_TICK = """
INSERT INTO queue_ticks (schedule, tick_at, fired_at)
VALUES (:schedule, :tick_at, :now)
ON CONFLICT (schedule, tick_at) DO NOTHING
RETURNING 1
"""

_NOTE_TICK = """
UPDATE queue_ticks
SET job_id = :job_id
WHERE schedule = :schedule AND tick_at = :tick_at
"""

_IS_PAUSED = """
SELECT 1 FROM queue_pauses
WHERE queue = :queue
"""

_PAUSE = """
INSERT INTO queue_pauses (queue, reason, paused_at)
VALUES (:queue, :reason, :now)
ON CONFLICT (queue) DO UPDATE
SET reason = excluded.reason
"""

_RESUME = """
DELETE FROM queue_pauses
WHERE queue = :queue
RETURNING queue
"""

_FIND = """
SELECT status FROM queue_jobs
WHERE id = :job_id
"""

_KEEP_CANCELLED = """
INSERT INTO queue_history (
    job_id, status, queue, job_type, priority, attempt, max_attempts, "key", tenant, context, headers, payload, errors,
    created_at, available_at, finished_at
)
SELECT id, 'cancelled', queue, job_type, priority, attempt, max_attempts, "key", tenant, context, headers, payload,
       errors, created_at, available_at, :now
FROM queue_jobs
WHERE id = :job_id AND (:keeps_all OR queue IN (SELECT value FROM json_each(:kept)))
"""

_REMOVE = """
DELETE FROM queue_jobs
WHERE id = :job_id
"""

_REQUEST_CANCEL = """
UPDATE queue_jobs
SET cancel_requested_at = coalesce(cancel_requested_at, :now)
WHERE id = :job_id
"""


class SqliteUpkeep(SqliteSql):
    """The `UpkeepSql` of SQLite."""

    one_statement = False

    def __init__(self, clock: Clock, history: History) -> None:
        super().__init__(clock, history)
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
        self._is_paused = self._statement(_IS_PAUSED)
        self._pause = self._statement(_PAUSE)
        self._resume = self._statement(_RESUME)
        self._find = self._statement(_FIND)
        self._keep_cancelled = self._statement(_KEEP_CANCELLED)
        self._remove = self._statement(_REMOVE)
        self._request_cancel = self._statement(_REQUEST_CANCEL)

    def stop_worker(self, worker: WorkerId) -> Call:
        return Call(self._stop_worker, {"now": self._now(), "worker": worker})

    def is_abandoned(self, queues: Collection[QueueName]) -> Call:
        return Call(self._is_abandoned, {"now": self._now(), "queues": as_json(list(queues)), **self._limits()})

    def lock_silent(self, queues: Collection[QueueName], limit: int) -> Call:
        return Call(self._lock_silent, {"now": self._now(), "queues": as_json(list(queues)), "limit": limit})

    def lock_dead(self, workers: Collection[WorkerId]) -> Call:
        return Call(self._lock_dead, {"now": self._now(), "workers": as_json(list(workers))})

    def lock_abandoned(
        self, queues: Collection[QueueName], workers: Collection[WorkerId], limit: int, *, only_theirs: bool
    ) -> Call:
        parameters = {"queues": as_json(list(queues)), "workers": as_json(list(workers)), "limit": limit}
        # Nothing is older than NULL.
        limits = dict.fromkeys(self._limits()) if only_theirs else self._limits()
        return Call(self._lock_abandoned, {**parameters, **limits})

    def read_abandoned(self, rows: Rows) -> Sequence[Abandoned]:
        seen_at = self._clock.now()
        found: list[Abandoned] = []
        for token, cause, called_off, *columns in rows:
            job = driver_job(columns, instant)
            found.append(Abandoned(job, Claim(job.id, Token(token)), cause, bool(called_off), seen_at))
        return found

    def _limits(self) -> dict[str, int]:
        now = self._now()
        return {"overdue": now - to_microseconds(OVERDUE), "missing": now - to_microseconds(MISSING)}

    def promote(self, queues: Collection[QueueName], limit: int) -> Call:
        return Call(self._promote, {"now": self._now(), "queues": as_json(list(queues)), "limit": limit})

    def prune_history(self, age: timedelta, limit: int) -> Call:
        return Call(self._prune_history, self._old(age, limit))

    def prune_ticks(self, age: timedelta, limit: int) -> Call:
        return Call(self._prune_ticks, self._old(age, limit))

    def prune_workers(self, age: timedelta, limit: int) -> Call:
        return Call(self._prune_workers, self._old(age, limit))

    def _old(self, age: timedelta, limit: int) -> dict[str, Any]:
        return {"before": self._now() - to_microseconds(age), "limit": limit}

    def fire_tick(self, schedule: str, tick_at: datetime) -> Call:
        tick = {"schedule": schedule, "tick_at": to_microseconds(tick_at)}
        return Call(self._fire_tick, {"now": self._now(), **tick})

    def note_tick(self, schedule: str, tick_at: datetime, job_id: JobId) -> Call:
        tick = {"schedule": schedule, "tick_at": to_microseconds(tick_at)}
        return Call(self._note_tick, {"job_id": job_id, **tick})

    def pause(self, queue: QueueName, reason: str | None) -> Steps[bool]:
        was_paused = yield Call(self._is_paused, {"queue": queue})
        yield Call(self._pause, {"now": self._now(), "queue": queue, "reason": reason})
        return not was_paused

    def resume(self, queue: QueueName) -> Call:
        return Call(self._resume, {"queue": queue})

    def cancel(self, job_id: JobId) -> Steps[str | None]:
        found = yield Call(self._find, {"job_id": job_id})
        if not found:
            return None
        status: str = found[0][0]
        if status == "claimed":
            yield Call(self._request_cancel, {"now": self._now(), "job_id": job_id})
            return status
        if self._keeps_history:
            yield Call(self._keep_cancelled, {"now": self._now(), "job_id": job_id, **self._kept})
        yield Call(self._remove, {"job_id": job_id})
        return status
