"""Enqueueing on Postgres: the statements, and how jobs become their parameters.

Values travel as arrays, one for each column: one prepared statement whatever the size of the batch, and
one round trip.
"""

from collections.abc import Sequence
from datetime import timedelta

from queue_core.clock import Clock, to_microseconds
from queue_core.model import KeyMode, NewJob

from .postgres_sql import PostgresSql
from .statement import Call, Statement
from .tables import Tables

# The lock timeout is set in the statement itself and
# for its transaction only: no round trip of its own, and nothing that a pooler would carry to somebody else.
_INSERT = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now,
           CASE WHEN CAST(:patience AS text) IS NOT NULL
                THEN set_config('lock_timeout', CAST(:patience AS text), true)
           END AS patience
)
INSERT INTO {jobs} AS jobs (
    request_id, queue, job_type, status, priority, max_attempts, available_at, created_at, expires_at,
    timeout, key, unique_key, tenant, backoff, context, headers, payload
)
SELECT new.request_id, new.queue, new.job_type,
       CASE WHEN new.run_at <= clock.now OR (new.run_at IS NULL AND new.delay = 0) THEN 'pending' ELSE 'scheduled' END,
       new.priority, new.max_attempts,
       coalesce(new.run_at, clock.now + new.delay * interval '1 microsecond'),
       clock.now,
       coalesce(new.expires_at, clock.now + new.expires_after * interval '1 microsecond'),
       new.timeout, new.key, new.unique_key, new.tenant, new.backoff, new.context, new.headers, new.payload
FROM clock,
     unnest(
         CAST(:request_id AS uuid[]), CAST(:queue AS text[]), CAST(:job_type AS text[]),
         CAST(:priority AS smallint[]), CAST(:max_attempts AS integer[]), CAST(:delay AS bigint[]),
         CAST(:run_at AS timestamptz[]), CAST(:expires_after AS bigint[]), CAST(:expires_at AS timestamptz[]),
         CAST(:timeout AS bigint[]), CAST(:key AS text[]), CAST(:unique_key AS text[]), CAST(:tenant AS text[]),
         CAST(:backoff AS text[]), CAST(:context AS text[]), CAST(:headers AS text[]), CAST(:payload AS text[])
     ) WITH ORDINALITY AS new (
         request_id, queue, job_type, priority, max_attempts, delay, run_at, expires_after, expires_at,
         timeout, key, unique_key, tenant, backoff, context, headers, payload, position
     )
"""

_IN_ORDER = """
ORDER BY new.position
"""

# A conflict locks the other row even when there is nothing to set: a job that runs could not be settled before the
# end of the transaction that wanted to replace it.
_UNLESS_RUNNING = """
WHERE NOT EXISTS (
    SELECT FROM {jobs} AS running WHERE running.unique_key = new.unique_key AND running.status = 'claimed'
)
ORDER BY new.position
"""

# Without a target it covers the request id and the key alike; which one it was is found out afterwards.
_KEEP = """
ON CONFLICT DO NOTHING
RETURNING id, CAST(request_id AS text), unique_key
"""

_REPLACE = """
ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO UPDATE
SET queue = excluded.queue, status = excluded.status, priority = excluded.priority,
    max_attempts = excluded.max_attempts, available_at = excluded.available_at, expires_at = excluded.expires_at,
    timeout = excluded.timeout, tenant = excluded.tenant, backoff = excluded.backoff, context = excluded.context,
    headers = excluded.headers, payload = excluded.payload, attempt = 0, crashes = 0, errors = NULL,
    cancel_requested_at = NULL
WHERE jobs.status <> 'claimed'
RETURNING id, CAST(request_id AS text), unique_key
"""

_PRESERVE_RUN_AT = """
ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO UPDATE
SET queue = excluded.queue, priority = excluded.priority,
    max_attempts = excluded.max_attempts, expires_at = excluded.expires_at,
    timeout = excluded.timeout, tenant = excluded.tenant, backoff = excluded.backoff, context = excluded.context,
    headers = excluded.headers, payload = excluded.payload, attempt = 0, crashes = 0, errors = NULL,
    cancel_requested_at = NULL
WHERE jobs.status <> 'claimed'
RETURNING id, CAST(request_id AS text), unique_key
"""

_FIND = """
SELECT id, CAST(request_id AS text), unique_key, status
FROM {jobs}
WHERE request_id = ANY(CAST(:request_ids AS uuid[]))
UNION
SELECT id, CAST(request_id AS text), unique_key, status
FROM {jobs}
WHERE unique_key = ANY(CAST(:unique_keys AS text[]))
"""


class PostgresEnqueue(PostgresSql):
    """The `EnqueueSql` of Postgres."""

    def __init__(self, tables: Tables, clock: Clock | None) -> None:
        super().__init__(tables, clock)
        self._inserts: dict[KeyMode, Statement] = {
            "keep": self._statement(_INSERT + _IN_ORDER + _KEEP),
            "replace": self._statement(_INSERT + _UNLESS_RUNNING + _REPLACE),
            "preserve_run_at": self._statement(_INSERT + _UNLESS_RUNNING + _PRESERVE_RUN_AT),
        }
        self._find = self._statement(_FIND)

    def insert_jobs(self, mode: KeyMode, jobs: Sequence[NewJob], patience: timedelta | None) -> Call:
        return Call(
            self._inserts[mode],
            {
                "now": self._now(),
                # At least a millisecond: 0 would mean to wait for ever.
                "patience": None if patience is None else f"{max(1, to_microseconds(patience) // 1000)}ms",
                "request_id": [job.request_id for job in jobs],
                "queue": [job.queue for job in jobs],
                "job_type": [job.job_type for job in jobs],
                "priority": [job.priority for job in jobs],
                "max_attempts": [job.max_attempts for job in jobs],
                "delay": [to_microseconds(job.delay) for job in jobs],
                "run_at": [job.run_at for job in jobs],
                "expires_after": [_microseconds(job.expires_after) for job in jobs],
                "expires_at": [job.expires_at for job in jobs],
                "timeout": [_microseconds(job.timeout) for job in jobs],
                "key": [job.key for job in jobs],
                "unique_key": [job.unique_key for job in jobs],
                "tenant": [job.tenant for job in jobs],
                "backoff": [job.backoff for job in jobs],
                "context": [job.context for job in jobs],
                "headers": [job.headers for job in jobs],
                "payload": [job.payload for job in jobs],
            },
        )

    def find_jobs(self, request_ids: Sequence[str], unique_keys: Sequence[str]) -> Call:
        return Call(self._find, {"request_ids": list(request_ids), "unique_keys": list(unique_keys)})


def _microseconds(span: timedelta | None) -> int | None:
    return None if span is None else to_microseconds(span)
