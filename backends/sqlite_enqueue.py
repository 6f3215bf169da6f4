"""Enqueueing on SQLite: the statements, and how jobs become their parameters.

The rows travel as one JSON text, in the order of the batch.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from queue_core.clock import Clock, to_microseconds
from queue_core.model import KeyMode, NewJob

from .sqlite_sql import SqliteSql, as_json
from .statement import Call, Statement

_INSERT = """
INSERT INTO queue_jobs AS jobs (
    request_id, queue, job_type, status, priority, max_attempts, available_at, created_at, expires_at,
    timeout, "key", unique_key, tenant, backoff, context, headers, payload
)
SELECT json_extract(item.value, '$[0]'),
       json_extract(item.value, '$[1]'),
       json_extract(item.value, '$[2]'),
       CASE WHEN json_extract(item.value, '$[5]') <= :now THEN 'pending' ELSE 'scheduled' END,
       json_extract(item.value, '$[3]'),
       json_extract(item.value, '$[4]'),
       json_extract(item.value, '$[5]'),
       :now,
       json_extract(item.value, '$[6]'),
       json_extract(item.value, '$[7]'),
       json_extract(item.value, '$[8]'),
       json_extract(item.value, '$[9]'),
       json_extract(item.value, '$[10]'),
       json_extract(item.value, '$[11]'),
       json_extract(item.value, '$[12]'),
       json_extract(item.value, '$[13]'),
       json_extract(item.value, '$[14]')
FROM json_each(:rows) AS item
WHERE true
ORDER BY item."key"
"""

# Without a target it covers the request id and the key alike; which one it was is found out afterwards.
_KEEP = """
ON CONFLICT DO NOTHING
RETURNING id, request_id, unique_key
"""

_REPLACE = """
ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO UPDATE
SET queue = excluded.queue, status = excluded.status, priority = excluded.priority,
    max_attempts = excluded.max_attempts, available_at = excluded.available_at, expires_at = excluded.expires_at,
    timeout = excluded.timeout, tenant = excluded.tenant, backoff = excluded.backoff, context = excluded.context,
    headers = excluded.headers, payload = excluded.payload, attempt = 0, crashes = 0, errors = NULL,
    cancel_requested_at = NULL
WHERE jobs.status <> 'claimed'
RETURNING id, request_id, unique_key
"""

_PRESERVE_RUN_AT = """
ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO UPDATE
SET queue = excluded.queue, priority = excluded.priority,
    max_attempts = excluded.max_attempts, expires_at = excluded.expires_at,
    timeout = excluded.timeout, tenant = excluded.tenant, backoff = excluded.backoff, context = excluded.context,
    headers = excluded.headers, payload = excluded.payload, attempt = 0, crashes = 0, errors = NULL,
    cancel_requested_at = NULL
WHERE jobs.status <> 'claimed'
RETURNING id, request_id, unique_key
"""

_FIND = """
SELECT id, request_id, unique_key, status
FROM queue_jobs
WHERE request_id IN (SELECT value FROM json_each(:request_ids))
UNION
SELECT id, request_id, unique_key, status
FROM queue_jobs
WHERE unique_key IN (SELECT value FROM json_each(:unique_keys))
"""


class SqliteEnqueue(SqliteSql):
    """The `EnqueueSql` of SQLite."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._inserts: dict[KeyMode, Statement] = {
            "keep": self._statement(_INSERT + _KEEP),
            "replace": self._statement(_INSERT + _REPLACE),
            "preserve_run_at": self._statement(_INSERT + _PRESERVE_RUN_AT),
        }
        self._find = self._statement(_FIND)

    def insert_jobs(self, mode: KeyMode, jobs: Sequence[NewJob], patience: timedelta | None) -> Call:
        now = self._now()
        rows = [
            (
                job.request_id,
                job.queue,
                job.job_type,
                job.priority,
                job.max_attempts,
                _moment(job.run_at, job.delay, now),
                _moment(job.expires_at, job.expires_after, now),
                None if job.timeout is None else to_microseconds(job.timeout),
                job.key,
                job.unique_key,
                job.tenant,
                job.backoff,
                job.context,
                job.headers,
                job.payload,
            )
            for job in jobs
        ]
        return Call(self._inserts[mode], {"now": now, "rows": as_json(rows)})

    def find_jobs(self, request_ids: Sequence[str], unique_keys: Sequence[str]) -> Call:
        return Call(self._find, {"request_ids": as_json(request_ids), "unique_keys": as_json(unique_keys)})


def _moment(at: datetime | None, after: timedelta | None, now: int) -> int | None:
    if at is not None:
        return to_microseconds(at)
    return None if after is None else now + to_microseconds(after)
