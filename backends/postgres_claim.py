"""Claiming, extending and beating on Postgres: a claim is one statement, and with it one transaction.

A claim looks at the front of each queue and type, without locks, to see how the rooms of a queue are
shared out among the types; then it takes that many of each, and skips what others hold. So it locks no
more than it takes, and keeps the order of priorities across the types. Every look is by the index and stops
early, whatever else waits beside it. When others hold the rows that a type was given room for, and it has no
more, the claim is short, and says so.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from queue_core.clock import Clock, to_microseconds
from queue_core.config import History
from queue_core.model import Claim, ClaimedJob, JobTypeName, QueueName, Token, Worker, WorkerId

from .claiming import Taken
from .postgres_sql import PostgresSql, same_instant
from .rows import claimed_job, worker_row
from .statement import Call
from .steps import Steps
from .tables import Tables

_WORKER_ROW = """
    INSERT INTO {workers} AS workers (
        id, host, boot_id, pid_namespace, pid, process_started, version, queues, job_types, lease,
        started_at, lease_until, wakeup_address, lock_file
    )
    SELECT CAST(:worker AS uuid), CAST(:host AS text), CAST(:boot_id AS text), CAST(:pid_namespace AS text),
           CAST(:pid AS integer), CAST(:process_started AS text), CAST(:version AS text), CAST(:queues AS text),
           CAST(:job_types AS text), CAST(:lease AS bigint), clock.now,
           clock.now + CAST(:lease AS bigint) * interval '1 microsecond',
           CAST(:wakeup_address AS text), CAST(:lock_file AS text)
    FROM clock
"""

_RENEWING = """
    ON CONFLICT (id) DO UPDATE
    SET lease_until = excluded.lease_until, stopped_at = NULL
"""

_REGISTER = (
    """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
)
"""
    + _WORKER_ROW
    + """
    ON CONFLICT (id) DO UPDATE
    SET lease = excluded.lease, lease_until = excluded.lease_until, stopped_at = NULL, queues = excluded.queues,
        job_types = excluded.job_types, wakeup_address = excluded.wakeup_address, lock_file = excluded.lock_file
"""
)

# The lease is renewed in the claim's own transaction: a first claim after a long idle must not be reapable. A fresh
# row is only looked at, since a conflict would lock it even when there is nothing to set.
# `= ANY(ARRAY(…))` and not a join with what is due, for which the planner may read the whole table.
_CLAIM = (
    """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
),
renewed AS (
"""
    + _WORKER_ROW
    + """
    WHERE NOT EXISTS (
        SELECT FROM {workers} AS fresh
        WHERE fresh.id = CAST(:worker AS uuid)
          AND fresh.stopped_at IS NULL
          AND fresh.lease_until >= clock.now + CAST(:lease AS bigint) * interval '1 microsecond' / 2
    )
"""
    + _RENEWING
    + """
),
wanted AS MATERIALIZED (
    SELECT wanted.queue, wanted.room
    FROM unnest(CAST(:wanted AS text[]), CAST(:rooms AS bigint[])) AS wanted (queue, room)
    WHERE NOT EXISTS (SELECT FROM {pauses} AS pauses WHERE pauses.queue = wanted.queue)
),
shares AS MATERIALIZED (
    SELECT ranked.queue, ranked.job_type, count(*) AS room
    FROM (
        SELECT wanted.queue, types.job_type, wanted.room,
               row_number() OVER (
                   PARTITION BY wanted.queue ORDER BY front.priority DESC, front.available_at, front.id
               ) AS place
        FROM wanted
        CROSS JOIN unnest(CAST(:types AS text[])) AS types (job_type)
        CROSS JOIN LATERAL (
            SELECT jobs.priority, jobs.available_at, jobs.id
            FROM {jobs} AS jobs
            WHERE jobs.status = 'pending' AND jobs.queue = wanted.queue AND jobs.job_type = types.job_type
            ORDER BY jobs.priority DESC, jobs.available_at, jobs.id
            LIMIT wanted.room
        ) AS front
    ) AS ranked
    WHERE ranked.place <= ranked.room
    GROUP BY ranked.queue, ranked.job_type
),
due AS MATERIALIZED (
    SELECT found.id,
           found.cancel_requested_at IS NOT NULL
               OR coalesce(found.attempt = 0 AND found.expires_at <= clock.now, false) AS is_over
    FROM shares
    CROSS JOIN clock
    CROSS JOIN LATERAL (
        SELECT jobs.id, jobs.attempt, jobs.expires_at, jobs.cancel_requested_at
        FROM {jobs} AS jobs
        WHERE jobs.status = 'pending' AND jobs.queue = shares.queue AND jobs.job_type = shares.job_type
        ORDER BY jobs.priority DESC, jobs.available_at, jobs.id
        LIMIT shares.room
        FOR UPDATE SKIP LOCKED
    ) AS found
),
ended AS (
    DELETE FROM {jobs} AS jobs
    WHERE jobs.id = ANY(ARRAY(SELECT due.id FROM due WHERE due.is_over))
    RETURNING jobs.*, CASE WHEN jobs.cancel_requested_at IS NULL THEN 'expired' ELSE 'cancelled' END AS new_status
),
kept AS (
    INSERT INTO {history} (
        job_id, status, queue, job_type, priority, attempt, max_attempts, key, tenant, context, headers, payload,
        errors, created_at, available_at, finished_at
    )
    SELECT ended.id, ended.new_status, ended.queue, ended.job_type, ended.priority, ended.attempt, ended.max_attempts,
           ended.key, ended.tenant, ended.context, ended.headers, ended.payload, ended.errors, ended.created_at,
           ended.available_at, clock.now
    FROM ended, clock
    WHERE CAST(:keeps_all AS boolean) OR ended.queue = ANY(CAST(:kept AS text[]))
),
claimed AS (
    UPDATE {jobs} AS jobs
    SET status = 'claimed',
        attempt = jobs.attempt + 1,
        worker_id = CAST(:worker AS uuid),
        claim_token = CAST(:token AS uuid),
        claimed_at = clock.now,
        deadline_at = clock.now + jobs.timeout * interval '1 microsecond'
    FROM clock
    WHERE jobs.id = ANY(ARRAY(SELECT due.id FROM due WHERE NOT due.is_over))
    RETURNING jobs.id, jobs.job_type, jobs.queue, jobs.payload, jobs.attempt, jobs.max_attempts, jobs.crashes,
              jobs.priority, jobs.timeout, jobs.backoff, jobs.key, jobs.tenant, jobs.context, jobs.headers,
              jobs.created_at, jobs.available_at, jobs.deadline_at
)
SELECT told.ended, told.is_short, claimed.*
FROM (
    SELECT (SELECT count(*) FROM ended) AS ended,
           (SELECT count(*) FROM due) < (SELECT coalesce(sum(shares.room), 0) FROM shares) AS is_short
) AS told
LEFT JOIN claimed ON true
"""
)

_FIND_CLAIMED = """
SELECT id, job_type, queue, payload, attempt, max_attempts, crashes, priority, timeout, backoff, key, tenant, context,
       headers, created_at, available_at, deadline_at
FROM {jobs}
WHERE status = 'claimed' AND worker_id = CAST(:worker AS uuid) AND claim_token = CAST(:token AS uuid)
"""

_GIVE_BACK = """
UPDATE {jobs}
SET status = 'pending', attempt = attempt - 1, worker_id = NULL, claim_token = NULL, claimed_at = NULL,
    deadline_at = NULL
WHERE status = 'claimed' AND worker_id = CAST(:worker AS uuid) AND claim_token = CAST(:token AS uuid)
RETURNING queue
"""

_EXTEND = """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
)
UPDATE {jobs} AS jobs
SET deadline_at = clock.now + CAST(:timeout AS bigint) * interval '1 microsecond'
FROM clock, unnest(CAST(:ids AS bigint[]), CAST(:tokens AS uuid[])) AS held (id, token)
WHERE jobs.id = held.id AND jobs.claim_token IS NOT DISTINCT FROM held.token AND jobs.status = 'claimed'
RETURNING jobs.id
"""

_RENEW = (
    """
WITH clock AS MATERIALIZED (
    SELECT coalesce(CAST(:now AS timestamptz), clock_timestamp()) AS now
)
"""
    + _WORKER_ROW
    + _RENEWING
)

_FIND_MINE = """
SELECT id, CAST(claim_token AS text), cancel_requested_at IS NOT NULL
FROM {jobs}
WHERE status = 'claimed' AND worker_id = CAST(:worker AS uuid)
"""

_RELEASE = """
UPDATE {jobs} AS jobs
SET status = 'pending', attempt = jobs.attempt - 1, worker_id = NULL, claim_token = NULL, claimed_at = NULL,
    deadline_at = NULL
FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS uuid[])) AS unknown (id, token)
WHERE jobs.id = unknown.id AND jobs.claim_token IS NOT DISTINCT FROM unknown.token AND jobs.status = 'claimed'
RETURNING jobs.id, jobs.queue
"""

_NEXT_DUE = """
SELECT CAST(
           extract(epoch FROM min(next.available_at) - coalesce(CAST(:now AS timestamptz), clock_timestamp()))
           * 1000000 AS bigint
       )
FROM unnest(CAST(:queues AS text[])) AS wanted (queue)
CROSS JOIN LATERAL (
    SELECT jobs.available_at
    FROM {jobs} AS jobs
    WHERE jobs.status = 'scheduled' AND jobs.queue = wanted.queue
    ORDER BY jobs.available_at
    LIMIT 1
) AS next
"""


class PostgresClaim(PostgresSql):
    """The `ClaimSql` of Postgres."""

    one_statement = True

    def __init__(self, tables: Tables, clock: Clock | None, history: History) -> None:
        super().__init__(tables, clock, history)
        self._register = self._statement(_REGISTER)
        self._claim = self._statement(_CLAIM)
        self._find_claimed = self._statement(_FIND_CLAIMED)
        self._give_back = self._statement(_GIVE_BACK)
        self._extend = self._statement(_EXTEND)
        self._renew = self._statement(_RENEW)
        self._find_mine = self._statement(_FIND_MINE)
        self._release = self._statement(_RELEASE)
        self._next_due = self._statement(_NEXT_DUE)

    def register_worker(self, worker: Worker) -> Call:
        return Call(self._register, {"now": self._now(), **worker_row(worker)})

    def claim(
        self, worker: Worker, token: Token, wanted: Mapping[QueueName, int], job_types: Collection[JobTypeName]
    ) -> Steps[Taken]:
        rows = yield Call(
            self._claim,
            {
                "now": self._now(),
                **worker_row(worker),
                **self._kept,
                "token": token,
                "wanted": list(wanted),
                "rooms": list(wanted.values()),
                "types": list(job_types),
            },
        )
        ended, is_short = rows[0][:2]
        jobs = [claimed_job(row[2:], token, same_instant) for row in rows if row[2] is not None]
        return Taken(jobs, ended, is_short)

    def find_claimed(self, worker: WorkerId, token: Token) -> Steps[Sequence[ClaimedJob]]:
        rows = yield Call(self._find_claimed, {"worker": worker, "token": token})
        return [claimed_job(row, token, same_instant) for row in rows]

    def give_back(self, worker: WorkerId, token: Token) -> Call:
        return Call(self._give_back, {"worker": worker, "token": token})

    def extend(self, claims: Sequence[Claim], timeout: timedelta) -> Call:
        return Call(self._extend, {"now": self._now(), "timeout": to_microseconds(timeout), **_columns(claims)})

    def renew_lease(self, worker: Worker) -> Call:
        return Call(self._renew, {"now": self._now(), **worker_row(worker)})

    def find_mine(self, worker: WorkerId) -> Call:
        return Call(self._find_mine, {"worker": worker})

    def release(self, claims: Sequence[Claim]) -> Call:
        return Call(self._release, _columns(claims))

    def next_due(self, queues: Collection[QueueName]) -> Call:
        return Call(self._next_due, {"now": self._now(), "queues": list(queues)})


def _columns(claims: Sequence[Claim]) -> dict[str, Any]:
    return {"ids": [claim.job_id for claim in claims], "tokens": [claim.token for claim in claims]}
