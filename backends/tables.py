"""The tables, as SQLAlchemy Core. Alembic's revisions must give exactly these: a test compares them.

Texts have no length limit in the database; limits are checked before the write, where they can be told
to the caller. Nothing that a heartbeat updates is indexed: with an index on it no update was HOT.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UnaryExpression,
    column,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import UUID
from sqlalchemy.types import TypeDecorator

from queue_core.clock import instant, to_microseconds

if TYPE_CHECKING:
    _Instant = TypeDecorator[datetime]
    _Span = TypeDecorator[timedelta]
else:
    _Instant = _Span = TypeDecorator


class Instant(_Instant):
    """Aware and UTC in Python; timestamptz on Postgres, whole microseconds on SQLite.

    SQLAlchemy's own DateTime drops the offset on SQLite, and text compares wrongly with mixed offsets.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        return dialect.type_descriptor(self._for(dialect))

    def _for(self, dialect: Dialect) -> Any:
        return DateTime(timezone=True).with_variant(BigInteger(), "sqlite").dialect_impl(dialect)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return value if value is None or not self._counts(dialect) else to_microseconds(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        return instant(value) if isinstance(value, int) else value

    def _counts(self, dialect: Dialect) -> bool:
        return isinstance(self._for(dialect), BigInteger)


class Span(_Span):
    """A timedelta, stored as whole microseconds on both."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: timedelta | None, dialect: Dialect) -> int | None:
        return None if value is None else to_microseconds(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> timedelta | None:
        return None if value is None else timedelta(microseconds=value)


def Token() -> Any:  # noqa: N802 reads as a type
    """A client-made UUID: 16 bytes on Postgres, text on SQLite, str in Python on both."""
    return Text().with_variant(UUID(as_uuid=False), "postgresql")


def _id() -> Column[int]:
    # AUTOINCREMENT: without it SQLite gives the id of a deleted last row out again.
    return Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


def _descending(name: str) -> UnaryExpression[Any]:
    # A column and not text("… DESC"), which Alembic can't compare with what it finds on SQLite.
    return column(name, Integer).desc()


def _store(table: Table, parameters: str) -> None:
    """Set storage parameters on Postgres; as a statement of its own, because SQLAlchemy 2.0 has no other way."""
    statement = DDL(f"ALTER TABLE %(fullname)s SET ({parameters})")
    event.listen(table, "after_create", statement.execute_if(dialect="postgresql"))


@dataclass(frozen=True)
class Tables:
    """The tables of one schema."""

    metadata: MetaData
    jobs: Table
    dead_jobs: Table
    workers: Table
    pauses: Table
    ticks: Table
    history: Table


def build_tables(schema: str | None = None) -> Tables:
    """The tables in the given Postgres schema; None is the connection's own."""
    metadata = MetaData(schema=schema)
    return Tables(
        metadata=metadata,
        jobs=_jobs(metadata),
        dead_jobs=_dead_jobs(metadata),
        workers=_workers(metadata),
        pauses=_pauses(metadata),
        ticks=_ticks(metadata),
        history=_history(metadata),
    )


def _jobs(metadata: MetaData) -> Table:
    """Jobs that are scheduled, pending or claimed; nothing finished is ever in here.

    `errors` has the failures of earlier attempts: one JSON object a line, the newest last, ten at most.
    """
    jobs = Table(
        "queue_jobs",
        metadata,
        _id(),
        Column("request_id", Token(), nullable=False),
        Column("queue", Text, nullable=False),
        Column("job_type", Text, nullable=False),
        Column("status", Text, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        Column("attempt", Integer, nullable=False, server_default=text("0")),
        Column("max_attempts", Integer, nullable=False),
        Column("crashes", Integer, nullable=False, server_default=text("0")),
        Column("available_at", Instant(), nullable=False),
        Column("created_at", Instant(), nullable=False),
        Column("expires_at", Instant()),
        Column("timeout", Span()),
        Column("worker_id", Token()),
        Column("claim_token", Token()),
        Column("claimed_at", Instant()),
        Column("deadline_at", Instant()),
        Column("cancel_requested_at", Instant()),
        Column("key", Text),
        Column("unique_key", Text),
        Column("tenant", Text),
        Column("backoff", Text),
        Column("context", Text),
        Column("headers", Text),
        Column("errors", Text),
        Column("payload", Text, nullable=False),
        CheckConstraint("status IN ('scheduled', 'pending', 'claimed')", name="queue_jobs_status"),
        Index("queue_jobs_request", "request_id", unique=True),
        Index(
            "queue_jobs_unique_key",
            "unique_key",
            unique=True,
            postgresql_where=text("unique_key IS NOT NULL"),
            sqlite_where=text("unique_key IS NOT NULL"),
        ),
        # The claim's own order, to the letter: any other and a claim sorts the whole queue. The type comes before it,
        # because a worker must not wade through 100,000 jobs of types that it does not have.
        Index(
            "queue_jobs_pending",
            "queue",
            "job_type",
            _descending("priority"),
            "available_at",
            "id",
            postgresql_where=text("status = 'pending'"),
            sqlite_where=text("status = 'pending'"),
        ),
        # Future jobs apart: in the ready index 100,000 of them made a claim 16 times slower.
        Index(
            "queue_jobs_scheduled",
            "queue",
            "available_at",
            postgresql_where=text("status = 'scheduled'"),
            sqlite_where=text("status = 'scheduled'"),
        ),
        Index(
            "queue_jobs_claimed",
            "worker_id",
            "claim_token",
            postgresql_where=text("status = 'claimed'"),
            sqlite_where=text("status = 'claimed'"),
        ),
        sqlite_autoincrement=True,
    )
    # Every row is updated and deleted soon: room on the page for the new version, and a vacuum that counts
    # dead rows instead of waiting for a share of a table that is nearly always small.
    _store(
        jobs,
        "fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,"
        " autovacuum_vacuum_cost_delay = 0",
    )
    return jobs


def _dead_jobs(metadata: MetaData) -> Table:
    """Dead letters. `identity` is the job's unique key, or stands for its lineage: one entry per logical job.

    A requeued job takes it as its unique key. `error` is the last failure, `errors` is what `queue_jobs` had in it.
    """
    return Table(
        "queue_dead_jobs",
        metadata,
        _id(),
        Column("identity", Text, nullable=False),
        Column("job_id", BigInteger, nullable=False),
        Column("queue", Text, nullable=False),
        Column("job_type", Text, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        Column("max_attempts", Integer, nullable=False),
        Column("timeout", Span()),
        Column("backoff", Text),
        Column("key", Text),
        Column("tenant", Text),
        Column("context", Text),
        Column("headers", Text),
        Column("payload", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("parked_by", Text, nullable=False),
        Column("failure_count", Integer, nullable=False),
        Column("error_kind", Text),
        Column("fingerprint", Text),
        Column("error", Text),
        Column("errors", Text),
        Column("created_at", Instant(), nullable=False),
        Column("run_at", Instant(), nullable=False),
        Column("failed_at", Instant(), nullable=False),
        Column("requeued_count", Integer, nullable=False, server_default=text("0")),
        Column("requeued_at", Instant()),
        Column("requeued_job_id", BigInteger),
        Column("notes", Text),
        Index("queue_dead_jobs_identity", "identity", unique=True),
        Index("queue_dead_jobs_failed", _descending("failed_at"), _descending("id")),
        Index("queue_dead_jobs_type", "job_type", _descending("failed_at"), _descending("id")),
        Index("queue_dead_jobs_queue", "queue", _descending("failed_at"), _descending("id")),
        sqlite_autoincrement=True,
    )


def _workers(metadata: MetaData) -> Table:
    """Who may hold claims, until when, and what proves that its process is still there."""
    workers = Table(
        "queue_workers",
        metadata,
        Column("id", Token(), primary_key=True),
        Column("host", Text, nullable=False),
        Column("boot_id", Text, nullable=False),
        Column("pid_namespace", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("process_started", Text, nullable=False),
        Column("version", Text, nullable=False),
        Column("queues", Text, nullable=False),
        Column("job_types", Text, nullable=False),
        Column("lease", Span(), nullable=False),
        Column("started_at", Instant(), nullable=False),
        Column("lease_until", Instant(), nullable=False),
        Column("stopped_at", Instant()),
        Column("wakeup_address", Text),
        Column("lock_file", Text),
    )
    # One row, updated for ever: leave room for the new version beside the old one.
    _store(workers, "fillfactor = 50")
    return workers


def _pauses(metadata: MetaData) -> Table:
    """Queues that nobody claims from for now."""
    return Table(
        "queue_pauses",
        metadata,
        Column("queue", Text, primary_key=True),
        Column("reason", Text),
        Column("paused_at", Instant(), nullable=False),
    )


def _ticks(metadata: MetaData) -> Table:
    """Which ticks of which schedule have fired; the primary key is what makes each fire once."""
    return Table(
        "queue_ticks",
        metadata,
        Column("schedule", Text, nullable=False),
        Column("tick_at", Instant(), nullable=False),
        Column("job_id", BigInteger),
        Column("fired_at", Instant(), nullable=False),
        PrimaryKeyConstraint("schedule", "tick_at", name="queue_ticks_pkey"),
    )


def _history(metadata: MetaData) -> Table:
    """Finished jobs, where a queue asked to keep them."""
    return Table(
        "queue_history",
        metadata,
        _id(),
        Column("job_id", BigInteger, nullable=False),
        Column("status", Text, nullable=False),
        Column("queue", Text, nullable=False),
        Column("job_type", Text, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("max_attempts", Integer, nullable=False),
        Column("key", Text),
        Column("tenant", Text),
        Column("context", Text),
        Column("headers", Text),
        Column("payload", Text, nullable=False),
        Column("result", Text),
        Column("reason", Text),
        Column("errors", Text),
        Column("worker_id", Token()),
        Column("created_at", Instant(), nullable=False),
        Column("available_at", Instant(), nullable=False),
        Column("claimed_at", Instant()),
        Column("finished_at", Instant(), nullable=False),
        CheckConstraint("status IN ('succeeded', 'cancelled', 'expired')", name="queue_history_status"),
        Index("queue_history_finished", "queue", "finished_at", "id"),
        Index("queue_history_age", "finished_at"),
        Index("queue_history_job", "job_id"),
        sqlite_autoincrement=True,
    )
