"""Claiming, extending and beating on SQLite.

A claim takes the front of each queue and type, by the index, and the best of those up to the rooms of the
queue. There is no lock to skip: the transaction is the only writer.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from queue_core.clock import Clock, instant, to_microseconds
from queue_core.config import History
from queue_core.model import Claim, ClaimedJob, JobId, JobTypeName, QueueName, Token, Worker, WorkerId

from .claiming import Taken
from .rows import claimed_job, worker_row
from .sqlite_sql import SqliteSql, as_json
from .statement import Call
from .steps import Steps

_WORKER_ROW = """
INSERT INTO queue_workers (
    id, host, boot_id, pid_namespace, pid, process_started, version, queues, job_types, lease,
    started_at, lease_until, wakeup_address, lock_file
)
SELECT :worker, :host, :boot_id, :pid_namespace, :pid, :process_started, :version, :queues, :job_types, :lease,
       :now, :now + :lease, :wakeup_address, :lock_file
"""

_RENEWING = """
ON CONFLICT (id) DO UPDATE
SET lease_until = excluded.lease_until, stopped_at = NULL
"""

_REGISTER = (
    _WORKER_ROW
    + """
WHERE true
ON CONFLICT (id) DO UPDATE
SET lease = excluded.lease, lease_until = excluded.lease_until, stopped_at = NULL, queues = excluded.queues,
    job_types = excluded.job_types, wakeup_address = excluded.wakeup_address, lock_file = excluded.lock_file
"""
)

_RENEW = _WORKER_ROW + "WHERE true" + _RENEWING

# In the claim's own transaction: a first claim after a long idle must not be reapable.
_RENEW_STALE = (
    _WORKER_ROW
    + """
WHERE NOT EXISTS (
    SELECT 1 FROM queue_workers AS fresh
    WHERE fresh.id = :worker AND fresh.stopped_at IS NULL AND fresh.lease_until >= :now + :lease / 2
)
"""
    + _RENEWING
)

_IS_ANYTHING_PENDING = """
SELECT 1
FROM json_each(:wanted) AS wanted
CROSS JOIN json_each(:types) AS types
WHERE EXISTS (
    SELECT 1 FROM queue_jobs AS jobs INDEXED BY queue_jobs_pending
    WHERE jobs.status = 'pending' AND jobs.queue = wanted."key" AND jobs.job_type = types.value
)
AND NOT EXISTS (SELECT 1 FROM queue_pauses AS pauses WHERE pauses.queue = wanted."key")
LIMIT 1
"""

# LIMIT can't name a column: `:most` is the largest of the rooms, and `place` keeps each queue to its own.
_CLAIM = """
UPDATE queue_jobs
SET status = 'claimed',
    attempt = attempt + 1,
    worker_id = :worker,
    claim_token = :token,
    claimed_at = :now,
    deadline_at = :now + timeout
WHERE id IN (
    SELECT ranked.id
    FROM (
        SELECT jobs.id, wanted.value AS room,
               row_number() OVER (
                   PARTITION BY jobs.queue ORDER BY jobs.priority DESC, jobs.available_at, jobs.id
               ) AS place
        FROM json_each(:wanted) AS wanted
        CROSS JOIN json_each(:types) AS types
        CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id IN (
            SELECT front.id
            FROM queue_jobs AS front INDEXED BY queue_jobs_pending
            WHERE front.status = 'pending' AND front.queue = wanted."key" AND front.job_type = types.value
            ORDER BY front.priority DESC, front.available_at, front.id
            LIMIT :most
        )
        WHERE NOT EXISTS (SELECT 1 FROM queue_pauses AS pauses WHERE pauses.queue = wanted."key")
    ) AS ranked
    WHERE ranked.place <= ranked.room
)
RETURNING id, job_type, queue, payload, attempt, max_attempts, crashes, priority, timeout, backoff, "key", tenant,
          context, headers, created_at, available_at, deadline_at, cancel_requested_at, expires_at
"""

_KEEP_ENDED = """
INSERT INTO queue_history (
    job_id, status, queue, job_type, priority, attempt, max_attempts, "key", tenant, context, headers, payload, errors,
    created_at, available_at, finished_at
)
SELECT jobs.id, json_extract(ended.value, '$[1]'), jobs.queue, jobs.job_type, jobs.priority, jobs.attempt - 1,
       jobs.max_attempts, jobs."key", jobs.tenant, jobs.context, jobs.headers, jobs.payload, jobs.errors,
       jobs.created_at, jobs.available_at, :now
FROM json_each(:ended) AS ended
CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id = json_extract(ended.value, '$[0]')
WHERE :keeps_all OR jobs.queue IN (SELECT value FROM json_each(:kept))
"""

_END = """
DELETE FROM queue_jobs
WHERE id IN (SELECT json_extract(value, '$[0]') FROM json_each(:ended))
"""

_FIND_CLAIMED = """
SELECT id, job_type, queue, payload, attempt, max_attempts, crashes, priority, timeout, backoff, "key", tenant, context,
       headers, created_at, available_at, deadline_at
FROM queue_jobs INDEXED BY queue_jobs_claimed
WHERE status = 'claimed' AND worker_id = :worker AND claim_token = :token
"""

_GIVE_BACK = """
UPDATE queue_jobs
SET status = 'pending', attempt = attempt - 1, worker_id = NULL, claim_token = NULL, claimed_at = NULL,
    deadline_at = NULL
WHERE status = 'claimed' AND worker_id = :worker AND claim_token = :token
RETURNING queue
"""

_EXTEND = """
UPDATE queue_jobs
SET deadline_at = :now + :timeout
WHERE id IN (
    SELECT jobs.id
    FROM json_each(:claims) AS held
    CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id = json_extract(held.value, '$[0]')
    WHERE jobs.claim_token = json_extract(held.value, '$[1]') AND jobs.status = 'claimed'
)
RETURNING id
"""

_FIND_MINE = """
SELECT id, claim_token, cancel_requested_at IS NOT NULL
FROM queue_jobs INDEXED BY queue_jobs_claimed
WHERE status = 'claimed' AND worker_id = :worker
"""

_RELEASE = """
UPDATE queue_jobs
SET status = 'pending', attempt = attempt - 1, worker_id = NULL, claim_token = NULL, claimed_at = NULL,
    deadline_at = NULL
WHERE id IN (
    SELECT jobs.id
    FROM json_each(:claims) AS unknown
    CROSS JOIN queue_jobs AS jobs NOT INDEXED ON jobs.id = json_extract(unknown.value, '$[0]')
    WHERE jobs.claim_token = json_extract(unknown.value, '$[1]') AND jobs.status = 'claimed'
)
RETURNING id, queue
"""

_NEXT_DUE = """
SELECT min((
    SELECT jobs.available_at
    FROM queue_jobs AS jobs INDEXED BY queue_jobs_scheduled
    WHERE jobs.status = 'scheduled' AND jobs.queue = wanted.value
    ORDER BY jobs.available_at
    LIMIT 1
)) - :now
FROM json_each(:queues) AS wanted
"""


class SqliteClaim(SqliteSql):
    """The `ClaimSql` of SQLite."""

    one_statement = False

    def __init__(self, clock: Clock, history: History) -> None:
        super().__init__(clock, history)
        self._register = self._statement(_REGISTER)
        self._renew = self._statement(_RENEW)
        self._renew_stale = self._statement(_RENEW_STALE)
        self._is_anything_pending = self._statement(_IS_ANYTHING_PENDING)
        self._claim = self._statement(_CLAIM)
        self._keep_ended = self._statement(_KEEP_ENDED)
        self._end = self._statement(_END)
        self._find_claimed = self._statement(_FIND_CLAIMED)
        self._give_back = self._statement(_GIVE_BACK)
        self._extend = self._statement(_EXTEND)
        self._find_mine = self._statement(_FIND_MINE)
        self._release = self._statement(_RELEASE)
        self._next_due = self._statement(_NEXT_DUE)

    def register_worker(self, worker: Worker) -> Call:
        return Call(self._register, {"now": self._now(), **worker_row(worker)})

    def is_anything_pending(self, wanted: Mapping[QueueName, int], job_types: Collection[JobTypeName]) -> Call:
        return Call(self._is_anything_pending, {"wanted": as_json(wanted), "types": as_json(list(job_types))})

    def claim(
        self, worker: Worker, token: Token, wanted: Mapping[QueueName, int], job_types: Collection[JobTypeName]
    ) -> Steps[Taken]:
        row = {"now": self._now(), **worker_row(worker)}
        yield Call(self._renew_stale, row)
        rows = yield Call(
            self._claim,
            {
                "worker": worker.id,
                "token": token,
                "now": row["now"],
                "wanted": as_json(wanted),
                "most": max(wanted.values()),
                "types": as_json(list(job_types)),
            },
        )
        jobs: list[ClaimedJob] = []
        ended: list[tuple[JobId, str]] = []
        # Told apart here: inside RETURNING, SQLite 3.40 takes every `cancel_requested_at IS NOT NULL` for true.
        for *columns, cancel_requested_at, expires_at in rows:
            job = claimed_job(columns, token, instant)
            if cancel_requested_at is not None:
                ended.append((job.claim.job_id, "cancelled"))
            elif job.attempt == 1 and expires_at is not None and expires_at <= row["now"]:
                ended.append((job.claim.job_id, "expired"))
            else:
                jobs.append(job)
        if ended:
            yield from self._end_instead(ended)
        return Taken(jobs, len(ended), is_short=False)

    def _end_instead(self, ended: Sequence[tuple[JobId, str]]) -> Steps[None]:
        parameters = {"ended": as_json(ended)}
        if self._keeps_history:
            yield Call(self._keep_ended, {"now": self._now(), **parameters, **self._kept})
        yield Call(self._end, parameters)

    def find_claimed(self, worker: WorkerId, token: Token) -> Steps[Sequence[ClaimedJob]]:
        rows = yield Call(self._find_claimed, {"worker": worker, "token": token})
        return [claimed_job(row, token, instant) for row in rows]

    def give_back(self, worker: WorkerId, token: Token) -> Call:
        return Call(self._give_back, {"worker": worker, "token": token})

    def extend(self, claims: Sequence[Claim], timeout: timedelta) -> Call:
        parameters = {"now": self._now(), "timeout": to_microseconds(timeout), "claims": _pairs(claims)}
        return Call(self._extend, parameters)

    def renew_lease(self, worker: Worker) -> Call:
        return Call(self._renew, {"now": self._now(), **worker_row(worker)})

    def find_mine(self, worker: WorkerId) -> Call:
        return Call(self._find_mine, {"worker": worker})

    def release(self, claims: Sequence[Claim]) -> Call:
        return Call(self._release, {"claims": _pairs(claims)})

    def next_due(self, queues: Collection[QueueName]) -> Call:
        return Call(self._next_due, {"now": self._now(), "queues": as_json(list(queues))})


def _pairs(claims: Sequence[Claim]) -> str:
    return as_json([(claim.job_id, claim.token) for claim in claims])
