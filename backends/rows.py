"""Between a driver's rows and the model's data."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec
from sqlalchemy import RowMapping

from queue_core.clock import to_microseconds
from queue_core.model import Claim, ClaimedJob, JobStatus, StoredJob, Token, Worker

ReadInstant: TypeAlias = Callable[[Any], datetime]

_INSTANTS: Final = ("created_at", "available_at", "expires_at", "claimed_at", "deadline_at")
_names = msgspec.json.Decoder(list[str]).decode
_encode = msgspec.json.Encoder().encode


def claimed_job(row: Sequence[Any], token: Token, read_instant: ReadInstant) -> ClaimedJob:
    """A job out of the columns that a claim returns."""
    (
        job_id,
        job_type,
        queue,
        payload,
        attempt,
        max_attempts,
        crashes,
        priority,
        timeout,
        backoff,
        key,
        tenant,
        context,
        headers,
        created_at,
        available_at,
        deadline_at,
    ) = row
    return ClaimedJob(
        claim=Claim(job_id, token),
        job_type=job_type,
        queue=queue,
        payload=payload,
        attempt=attempt,
        max_attempts=max_attempts,
        crashes=crashes,
        priority=priority,
        timeout=None if timeout is None else timedelta(microseconds=timeout),
        backoff=backoff,
        key=key,
        tenant=tenant,
        context=context,
        headers=headers,
        created_at=read_instant(created_at),
        available_at=read_instant(available_at),
        deadline_at=None if deadline_at is None else read_instant(deadline_at),
        # It may be the one that ends its process: what runs beside it would go down with it.
        runs_alone=crashes >= 2 or (crashes >= 1 and attempt >= max_attempts),
    )


def in_claim_order(jobs: Sequence[ClaimedJob]) -> Sequence[ClaimedJob]:
    """Sorted, because RETURNING keeps no order on either database."""
    return sorted(jobs, key=lambda job: (-job.priority, job.available_at, job.claim.job_id))


def stored_job(values: Mapping[str, Any] | RowMapping) -> StoredJob:
    """A job out of columns that are named and typed as its fields."""
    fields: dict[str, Any] = {name: values[name] for name in StoredJob.__struct_fields__}
    headers = fields.pop("headers")
    return StoredJob(
        status=JobStatus(fields.pop("status")),
        headers={} if headers is None else msgspec.json.decode(headers, type=dict[str, str]),
        **fields,
    )


def driver_job(row: Sequence[Any], read_instant: ReadInstant) -> StoredJob:
    """The same out of a driver's own values, in the order of the fields."""
    values: dict[str, Any] = dict(zip(StoredJob.__struct_fields__, row, strict=True))
    for name in _INSTANTS:
        if values[name] is not None:
            values[name] = read_instant(values[name])
    if values["timeout"] is not None:
        values["timeout"] = timedelta(microseconds=values["timeout"])
    return stored_job(values)


def worker_of(values: RowMapping) -> Worker:
    """A worker out of its row."""
    fields: dict[str, Any] = {name: values[name] for name in Worker.__struct_fields__}
    queues, job_types = _names(fields.pop("queues")), _names(fields.pop("job_types"))
    return Worker(queues=queues, job_types=job_types, **fields)


def worker_row(worker: Worker) -> dict[str, Any]:
    """The columns of a worker's row, as both dialects bind them."""
    return {
        "worker": worker.id,
        "host": worker.host,
        "boot_id": worker.boot_id,
        "pid_namespace": worker.pid_namespace,
        "pid": worker.pid,
        "process_started": worker.process_started,
        "version": worker.version,
        "queues": _encode(worker.queues).decode(),
        "job_types": _encode(worker.job_types).decode(),
        "lease": to_microseconds(worker.lease),
        "wakeup_address": worker.wakeup_address,
        "lock_file": worker.lock_file,
    }
