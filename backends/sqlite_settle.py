"""Settling on SQLite: a few statements for each thing that can happen to a job, in the one transaction of the batch.

Every first one of them names id and token of each claim as a pair: a token that another job of the same
batch holds must not help a stale claim.
"""

from collections.abc import Sequence

from queue_core.clock import Clock, to_microseconds
from queue_core.config import History
from queue_core.model import JobId, QueueName

from .settlement import Again, DeadLetter, Ended
from .sqlite_sql import SqliteSql, as_json
from .statement import Call
from .steps import Steps

_KEEP = """
INSERT INTO queue_history (
    job_id, status, queue, job_type, priority, attempt, max_attempts, "key", tenant, context, headers, payload, result,
    reason, errors, worker_id, created_at, available_at, claimed_at, finished_at
)
SELECT jobs.id, CASE WHEN json_extract(ended.value, '$[2]') THEN 'succeeded' ELSE 'cancelled' END,
       jobs.queue, jobs.job_type, jobs.priority, jobs.attempt, jobs.max_attempts, jobs."key", jobs.tenant, jobs.context,
       jobs.headers, jobs.payload, json_extract(ended.value, '$[3]'), json_extract(ended.value, '$[4]'), jobs.errors,
       jobs.worker_id, jobs.created_at, jobs.available_at, jobs.claimed_at, :now
FROM json_each(:jobs) AS ended
CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id = json_extract(ended.value, '$[0]')
WHERE jobs.claim_token = json_extract(ended.value, '$[1]')
  AND jobs.status = 'claimed'
  AND (:keeps_all OR jobs.queue IN (SELECT value FROM json_each(:kept)))
"""

_END = """
DELETE FROM queue_jobs
WHERE id IN (
    SELECT jobs.id
    FROM json_each(:jobs) AS ended
    CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id = json_extract(ended.value, '$[0]')
    WHERE jobs.claim_token = json_extract(ended.value, '$[1]') AND jobs.status = 'claimed'
)
RETURNING id, unique_key
"""

_CLEAR = """
DELETE FROM queue_dead_jobs
WHERE identity IN (SELECT value FROM json_each(:identities))
"""

# Of ten lines in `errors` the first makes room for the new one.
_GO_AGAIN = """
UPDATE queue_jobs NOT INDEXED
SET status = CASE WHEN json_extract(again.value, '$[2]') > 0 AND cancel_requested_at IS NULL THEN 'scheduled'
                  ELSE 'pending'
             END,
    available_at = CASE WHEN cancel_requested_at IS NULL
                        THEN coalesce(:now + json_extract(again.value, '$[2]'), available_at)
                        ELSE available_at
                   END,
    attempt = attempt - json_extract(again.value, '$[3]'),
    crashes = crashes + json_extract(again.value, '$[4]'),
    errors = CASE WHEN json_extract(again.value, '$[5]') IS NULL THEN errors
                  WHEN errors IS NULL THEN json_extract(again.value, '$[5]')
                  WHEN length(errors) - length(replace(errors, char(10), '')) >= 9
                  THEN substr(errors, instr(errors, char(10)) + 1) || char(10) || json_extract(again.value, '$[5]')
                  ELSE errors || char(10) || json_extract(again.value, '$[5]')
             END,
    worker_id = NULL,
    claim_token = NULL,
    claimed_at = NULL,
    deadline_at = NULL
FROM json_each(:jobs) AS again
WHERE queue_jobs.id = json_extract(again.value, '$[0]')
  AND queue_jobs.claim_token = json_extract(again.value, '$[1]')
  AND queue_jobs.status = 'claimed'
RETURNING id, CASE WHEN status = 'pending' THEN queue END
"""

_PARK = """
INSERT INTO queue_dead_jobs AS dead (
    identity, job_id, queue, job_type, priority, max_attempts, timeout, backoff, "key", tenant, context, headers,
    payload, reason, parked_by, failure_count, error_kind, fingerprint, error, errors, created_at, run_at, failed_at
)
SELECT coalesce(jobs.unique_key, '["request","' || jobs.request_id || '"]'),
       jobs.id, jobs.queue, jobs.job_type, jobs.priority, jobs.max_attempts, jobs.timeout, jobs.backoff, jobs."key",
       jobs.tenant, jobs.context, jobs.headers, jobs.payload, json_extract(parked.value, '$[2]'),
       json_extract(parked.value, '$[3]'), jobs.attempt, json_extract(parked.value, '$[5]'),
       json_extract(parked.value, '$[6]'), json_extract(parked.value, '$[4]'),
       CASE WHEN jobs.errors IS NULL THEN json_extract(parked.value, '$[4]')
            WHEN length(jobs.errors) - length(replace(jobs.errors, char(10), '')) >= 9
            THEN substr(jobs.errors, instr(jobs.errors, char(10)) + 1) || char(10) || json_extract(parked.value, '$[4]')
            ELSE jobs.errors || char(10) || json_extract(parked.value, '$[4]')
       END,
       jobs.created_at, jobs.available_at, :now
FROM json_each(:jobs) AS parked
CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id = json_extract(parked.value, '$[0]')
WHERE jobs.claim_token = json_extract(parked.value, '$[1]') AND jobs.status = 'claimed'
GROUP BY jobs.id
ON CONFLICT (identity) DO UPDATE
SET job_id = excluded.job_id, queue = excluded.queue, job_type = excluded.job_type, priority = excluded.priority,
    max_attempts = excluded.max_attempts, timeout = excluded.timeout, backoff = excluded.backoff,
    "key" = excluded."key", tenant = excluded.tenant, context = excluded.context, headers = excluded.headers,
    payload = excluded.payload, reason = excluded.reason, parked_by = excluded.parked_by,
    failure_count = dead.failure_count + excluded.failure_count,
    error_kind = excluded.error_kind, fingerprint = excluded.fingerprint, error = excluded.error,
    errors = excluded.errors, created_at = excluded.created_at, run_at = excluded.run_at,
    failed_at = excluded.failed_at, requeued_job_id = NULL
RETURNING job_id
"""

_REMOVE = """
DELETE FROM queue_jobs
WHERE id IN (SELECT value FROM json_each(:ids))
"""


class SqliteSettle(SqliteSql):
    """The `SettleSql` of SQLite."""

    one_statement = False

    def __init__(self, clock: Clock, history: History) -> None:
        super().__init__(clock, history)
        self._keep = self._statement(_KEEP)
        self._end = self._statement(_END)
        self._clear = self._statement(_CLEAR)
        self._go_again = self._statement(_GO_AGAIN)
        self._park = self._statement(_PARK)
        self._remove = self._statement(_REMOVE)

    def end(self, jobs: Sequence[Ended]) -> Steps[Sequence[JobId]]:
        if self._keeps_history:
            yield self._keep_call(jobs)
        rows = yield Call(self._end, {"jobs": as_json([(job.claim.job_id, job.claim.token) for job in jobs])})
        keys = {job_id: unique_key for job_id, unique_key in rows if unique_key is not None}
        if keys:
            succeeded = {job.claim.job_id for job in jobs if job.succeeded}
            identities = [unique_key for job_id, unique_key in keys.items() if job_id in succeeded]
            yield Call(self._clear, {"identities": as_json(identities)})
        return [row[0] for row in rows]

    def _keep_call(self, jobs: Sequence[Ended]) -> Call:
        rows = [
            (
                job.claim.job_id,
                job.claim.token,
                job.succeeded,
                job.result,
                job.reason,
            )
            for job in jobs
        ]
        return Call(self._keep, {"now": self._now(), "jobs": as_json(rows), **self._kept})

    def go_again(self, jobs: Sequence[Again]) -> Steps[Sequence[tuple[JobId, QueueName | None]]]:
        rows = [
            (
                job.claim.job_id,
                job.claim.token,
                None if job.wait is None else to_microseconds(job.wait),
                job.given_back,
                job.crashed,
                job.error,
            )
            for job in jobs
        ]
        found = yield Call(self._go_again, {"now": self._now(), "jobs": as_json(rows)})
        return [(job_id, queue) for job_id, queue in found]

    def park(self, jobs: Sequence[DeadLetter]) -> Steps[Sequence[JobId]]:
        rows = [
            (
                job.claim.job_id,
                job.claim.token,
                job.reason,
                job.parked_by,
                job.error.line,
                job.error.kind,
                job.error.fingerprint,
            )
            for job in jobs
        ]
        parked = [row[0] for row in (yield Call(self._park, {"now": self._now(), "jobs": as_json(rows)}))]
        yield Call(self._remove, {"ids": as_json(parked)})
        return parked
