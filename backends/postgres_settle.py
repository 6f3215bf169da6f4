"""Settling on Postgres: one statement for each thing that can happen to a job, whatever the size of the batch.

Every one of them names id and token of each claim as a pair: a token that another job of the same batch
holds must not help a stale claim. The token is compared with IS NOT DISTINCT FROM, for which no index can be
used: by the index of claimed jobs, a batch of n that shares one token read n² / 2 rows. What is returned
beside a job's own columns is named `new_…`, because an application may have added columns of any name.
"""

from collections.abc import Sequence

from queue_core.clock import Clock, to_microseconds
from queue_core.config import History
from queue_core.model import JobId, QueueName

from .postgres_sql import PostgresSql
from .settlement import Again, DeadLetter, Ended
from .statement import Call
from .steps import Steps
from .tables import Tables

_END = """
WITH gone AS (
    DELETE FROM {jobs} AS jobs
    USING unnest(CAST(:ids AS bigint[]), CAST(:tokens AS uuid[]), CAST(:succeeded AS boolean[]))
        AS ended (id, token, succeeded)
    WHERE jobs.id = ended.id AND jobs.claim_token IS NOT DISTINCT FROM ended.token AND jobs.status = 'claimed'
    RETURNING jobs.id, jobs.unique_key, ended.succeeded
),
cleared AS (
    DELETE FROM {dead_jobs}
    WHERE identity = ANY(ARRAY(SELECT gone.unique_key FROM gone WHERE gone.succeeded AND gone.unique_key IS NOT NULL))
)
SELECT gone.id FROM gone
"""

_END_AND_KEEP = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
),
gone AS (
    DELETE FROM {jobs} AS jobs
    USING unnest(
        CAST(:ids AS bigint[]), CAST(:tokens AS uuid[]), CAST(:succeeded AS boolean[]), CAST(:results AS text[]),
        CAST(:reasons AS text[])
    ) AS ended (id, token, succeeded, result, reason)
    WHERE jobs.id = ended.id AND jobs.claim_token IS NOT DISTINCT FROM ended.token AND jobs.status = 'claimed'
    RETURNING jobs.*, ended.succeeded AS new_succeeded, ended.result AS new_result, ended.reason AS new_reason
),
cleared AS (
    DELETE FROM {dead_jobs}
    WHERE identity = ANY(ARRAY(
        SELECT gone.unique_key FROM gone WHERE gone.new_succeeded AND gone.unique_key IS NOT NULL
    ))
),
kept AS (
    INSERT INTO {history} (
        job_id, status, queue, job_type, priority, attempt, max_attempts, key, tenant, context, headers, payload,
        result, reason, errors, worker_id, created_at, available_at, claimed_at, finished_at
    )
    SELECT gone.id, CASE WHEN gone.new_succeeded THEN 'succeeded' ELSE 'cancelled' END, gone.queue, gone.job_type,
           gone.priority, gone.attempt, gone.max_attempts, gone.key, gone.tenant, gone.context, gone.headers,
           gone.payload, gone.new_result, gone.new_reason, gone.errors, gone.worker_id, gone.created_at,
           gone.available_at, gone.claimed_at, clock.now
    FROM gone, clock
    WHERE CAST(:keeps_all AS boolean) OR gone.queue = ANY(CAST(:kept AS text[]))
)
SELECT gone.id FROM gone
"""

# Of ten lines in `errors` the first makes room for the new one.
_GO_AGAIN = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
)
UPDATE {jobs} AS jobs
SET status = CASE WHEN again.wait > 0 AND jobs.cancel_requested_at IS NULL THEN 'scheduled' ELSE 'pending' END,
    available_at = CASE WHEN again.wait IS NULL OR jobs.cancel_requested_at IS NOT NULL THEN jobs.available_at
                        ELSE clock.now + again.wait * interval '1 microsecond'
                   END,
    attempt = jobs.attempt - again.given_back,
    crashes = jobs.crashes + again.crashed,
    errors = CASE WHEN again.error IS NULL THEN jobs.errors
                  WHEN jobs.errors IS NULL THEN again.error
                  WHEN length(jobs.errors) - length(replace(jobs.errors, chr(10), '')) >= 9
                  THEN substr(jobs.errors, strpos(jobs.errors, chr(10)) + 1) || chr(10) || again.error
                  ELSE jobs.errors || chr(10) || again.error
             END,
    worker_id = NULL,
    claim_token = NULL,
    claimed_at = NULL,
    deadline_at = NULL
FROM clock,
     unnest(
         CAST(:ids AS bigint[]), CAST(:tokens AS uuid[]), CAST(:waits AS bigint[]), CAST(:given_back AS integer[]),
         CAST(:crashed AS integer[]), CAST(:errors AS text[])
     ) AS again (id, token, wait, given_back, crashed, error)
WHERE jobs.id = again.id AND jobs.claim_token IS NOT DISTINCT FROM again.token AND jobs.status = 'claimed'
RETURNING jobs.id, CASE WHEN jobs.status = 'pending' THEN jobs.queue END
"""

# One statement: the dead letter is written and the job is gone, or neither.
_PARK = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
),
gone AS (
    DELETE FROM {jobs} AS jobs
    USING unnest(
        CAST(:ids AS bigint[]), CAST(:tokens AS uuid[]), CAST(:reasons AS text[]), CAST(:parked_by AS text[]),
        CAST(:errors AS text[]), CAST(:kinds AS text[]), CAST(:fingerprints AS text[])
    ) AS parked (id, token, reason, parked_by, error, kind, fingerprint)
    WHERE jobs.id = parked.id AND jobs.claim_token IS NOT DISTINCT FROM parked.token AND jobs.status = 'claimed'
    RETURNING jobs.*, parked.reason AS new_reason, parked.parked_by AS new_parked_by, parked.error AS new_error,
              parked.kind AS new_kind, parked.fingerprint AS new_fingerprint
)
INSERT INTO {dead_jobs} AS dead (
    identity, job_id, queue, job_type, priority, max_attempts, timeout, backoff, key, tenant, context, headers, payload,
    reason, parked_by, failure_count, error_kind, fingerprint, error, errors, created_at, run_at, failed_at
)
SELECT coalesce(gone.unique_key, '["request","' || gone.request_id || '"]'),
       gone.id, gone.queue, gone.job_type, gone.priority, gone.max_attempts, gone.timeout, gone.backoff, gone.key,
       gone.tenant, gone.context, gone.headers, gone.payload, gone.new_reason, gone.new_parked_by, gone.attempt,
       gone.new_kind, gone.new_fingerprint, gone.new_error,
       CASE WHEN gone.errors IS NULL THEN gone.new_error
            WHEN length(gone.errors) - length(replace(gone.errors, chr(10), '')) >= 9
            THEN substr(gone.errors, strpos(gone.errors, chr(10)) + 1) || chr(10) || gone.new_error
            ELSE gone.errors || chr(10) || gone.new_error
       END,
       gone.created_at, gone.available_at, clock.now
FROM gone, clock
ON CONFLICT (identity) DO UPDATE
SET job_id = excluded.job_id, queue = excluded.queue, job_type = excluded.job_type, priority = excluded.priority,
    max_attempts = excluded.max_attempts, timeout = excluded.timeout, backoff = excluded.backoff, key = excluded.key,
    tenant = excluded.tenant, context = excluded.context, headers = excluded.headers, payload = excluded.payload,
    reason = excluded.reason, parked_by = excluded.parked_by,
    failure_count = dead.failure_count + excluded.failure_count,
    error_kind = excluded.error_kind, fingerprint = excluded.fingerprint, error = excluded.error,
    errors = excluded.errors, created_at = excluded.created_at, run_at = excluded.run_at,
    failed_at = excluded.failed_at, requeued_job_id = NULL
RETURNING dead.job_id
"""


class PostgresSettle(PostgresSql):
    """The `SettleSql` of Postgres."""

    one_statement = True

    def __init__(self, tables: Tables, clock: Clock | None, history: History) -> None:
        super().__init__(tables, clock, history)
        self._end = self._statement(_END)
        self._end_and_keep = self._statement(_END_AND_KEEP)
        self._go_again = self._statement(_GO_AGAIN)
        self._park = self._statement(_PARK)

    def end(self, jobs: Sequence[Ended]) -> Steps[Sequence[JobId]]:
        columns = {
            "ids": [job.claim.job_id for job in jobs],
            "tokens": [job.claim.token for job in jobs],
            "succeeded": [job.succeeded for job in jobs],
        }
        if not self._keeps_history:
            return [row[0] for row in (yield Call(self._end, columns))]
        kept = {
            "now": self._now(),
            "results": [job.result for job in jobs],
            "reasons": [job.reason for job in jobs],
        }
        return [row[0] for row in (yield Call(self._end_and_keep, {**columns, **kept, **self._kept}))]

    def go_again(self, jobs: Sequence[Again]) -> Steps[Sequence[tuple[JobId, QueueName | None]]]:
        rows = yield Call(
            self._go_again,
            {
                "now": self._now(),
                "ids": [job.claim.job_id for job in jobs],
                "tokens": [job.claim.token for job in jobs],
                "waits": [None if job.wait is None else to_microseconds(job.wait) for job in jobs],
                "given_back": [job.given_back for job in jobs],
                "crashed": [job.crashed for job in jobs],
                "errors": [job.error for job in jobs],
            },
        )
        return [(job_id, queue) for job_id, queue in rows]

    def park(self, jobs: Sequence[DeadLetter]) -> Steps[Sequence[JobId]]:
        rows = yield Call(
            self._park,
            {
                "now": self._now(),
                "ids": [job.claim.job_id for job in jobs],
                "tokens": [job.claim.token for job in jobs],
                "reasons": [job.reason for job in jobs],
                "parked_by": [job.parked_by for job in jobs],
                "errors": [job.error.line for job in jobs],
                "kinds": [job.error.kind for job in jobs],
                "fingerprints": [job.error.fingerprint for job in jobs],
            },
        )
        return [row[0] for row in rows]
