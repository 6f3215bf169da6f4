"""The first tables: jobs, dead jobs, workers, pauses, ticks, history."""

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import UUID

revision = "1_0001"
down_revision = None
branch_labels = None
depends_on = None


def _instant() -> Any:
    return sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")


def _token() -> Any:
    return sa.Text().with_variant(UUID(as_uuid=False), "postgresql")


def _id() -> sa.Column[int]:
    big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column("id", big, sa.Identity(), primary_key=True)


def upgrade(op: Operations, schema: str | None = None) -> None:
    _create_jobs(op, schema)
    _create_dead_jobs(op, schema)
    workers = op.create_table(
        "queue_workers",
        sa.Column("id", _token(), primary_key=True),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("pid_namespace", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("process_started", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("queues", sa.Text(), nullable=False),
        sa.Column("job_types", sa.Text(), nullable=False),
        sa.Column("lease", sa.BigInteger(), nullable=False),
        sa.Column("started_at", _instant(), nullable=False),
        sa.Column("lease_until", _instant(), nullable=False),
        sa.Column("stopped_at", _instant()),
        sa.Column("wakeup_address", sa.Text()),
        sa.Column("lock_file", sa.Text()),
        schema=schema,
    )
    _store(op, workers, "fillfactor = 50")
    op.create_table(
        "queue_pauses",
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("reason", sa.Text()),
        sa.Column("paused_at", _instant(), nullable=False),
        schema=schema,
    )
    op.create_table(
        "queue_ticks",
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("tick_at", _instant(), nullable=False),
        sa.Column("job_id", sa.BigInteger()),
        sa.Column("fired_at", _instant(), nullable=False),
        sa.PrimaryKeyConstraint("schedule", "tick_at", name="queue_ticks_pkey"),
        schema=schema,
    )
    _create_history(op, schema)


def downgrade(op: Operations, schema: str | None = None) -> None:
    for table in (
        "queue_history",
        "queue_ticks",
        "queue_pauses",
        "queue_workers",
        "queue_dead_jobs",
        "queue_jobs",
    ):
        op.drop_table(table, schema=schema)


def _store(op: Operations, table: sa.Table, parameters: str) -> None:
    dialect = op.get_context().dialect
    if dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {dialect.identifier_preparer.format_table(table)} SET ({parameters})")


def _create_jobs(op: Operations, schema: str | None) -> None:
    jobs = op.create_table(
        "queue_jobs",
        _id(),
        sa.Column("request_id", _token(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("job_type", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("available_at", _instant(), nullable=False),
        sa.Column("created_at", _instant(), nullable=False),
        sa.Column("expires_at", _instant()),
        sa.Column("timeout", sa.BigInteger()),
        sa.Column("worker_id", _token()),
        sa.Column("claim_token", _token()),
        sa.Column("claimed_at", _instant()),
        sa.Column("deadline_at", _instant()),
        sa.Column("cancel_requested_at", _instant()),
        sa.Column("key", sa.Text()),
        sa.Column("unique_key", sa.Text()),
        sa.Column("tenant", sa.Text()),
        sa.Column("backoff", sa.Text()),
        sa.Column("context", sa.Text()),
        sa.Column("headers", sa.Text()),
        sa.Column("errors", sa.Text()),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.CheckConstraint("status IN ('scheduled', 'pending', 'claimed')", name="queue_jobs_status"),
        schema=schema,
        sqlite_autoincrement=True,
    )
    _store(
        op,
        jobs,
        "fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,"
        " autovacuum_vacuum_cost_delay = 0",
    )
    op.create_index("queue_jobs_request", "queue_jobs", ["request_id"], unique=True, schema=schema)
    partial: list[tuple[str, list[str | sa.TextClause], str]] = [
        ("queue_jobs_unique_key", ["unique_key"], "unique_key IS NOT NULL"),
        (
            "queue_jobs_pending",
            ["queue", "job_type", sa.text("priority DESC"), "available_at", "id"],
            "status = 'pending'",
        ),
        ("queue_jobs_scheduled", ["queue", "available_at"], "status = 'scheduled'"),
        ("queue_jobs_claimed", ["worker_id", "claim_token"], "status = 'claimed'"),
    ]
    for name, columns, condition in partial:
        op.create_index(
            name,
            "queue_jobs",
            columns,
            unique=name == "queue_jobs_unique_key",
            schema=schema,
            postgresql_where=sa.text(condition),
            sqlite_where=sa.text(condition),
        )


def _create_dead_jobs(op: Operations, schema: str | None) -> None:
    op.create_table(
        "queue_dead_jobs",
        _id(),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("job_type", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("timeout", sa.BigInteger()),
        sa.Column("backoff", sa.Text()),
        sa.Column("key", sa.Text()),
        sa.Column("tenant", sa.Text()),
        sa.Column("context", sa.Text()),
        sa.Column("headers", sa.Text()),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("parked_by", sa.Text(), nullable=False),
        sa.Column("failure_count", sa.Integer(), nullable=False),
        sa.Column("error_kind", sa.Text()),
        sa.Column("fingerprint", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("errors", sa.Text()),
        sa.Column("created_at", _instant(), nullable=False),
        sa.Column("run_at", _instant(), nullable=False),
        sa.Column("failed_at", _instant(), nullable=False),
        sa.Column("requeued_count", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("requeued_at", _instant()),
        sa.Column("requeued_job_id", sa.BigInteger()),
        sa.Column("notes", sa.Text()),
        schema=schema,
        sqlite_autoincrement=True,
    )
    op.create_index("queue_dead_jobs_identity", "queue_dead_jobs", ["identity"], unique=True, schema=schema)
    newest_first = [sa.text("failed_at DESC"), sa.text("id DESC")]
    op.create_index("queue_dead_jobs_failed", "queue_dead_jobs", newest_first, schema=schema)
    op.create_index("queue_dead_jobs_type", "queue_dead_jobs", ["job_type", *newest_first], schema=schema)
    op.create_index("queue_dead_jobs_queue", "queue_dead_jobs", ["queue", *newest_first], schema=schema)


def _create_history(op: Operations, schema: str | None) -> None:
    op.create_table(
        "queue_history",
        _id(),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("job_type", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("key", sa.Text()),
        sa.Column("tenant", sa.Text()),
        sa.Column("context", sa.Text()),
        sa.Column("headers", sa.Text()),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("result", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.Column("errors", sa.Text()),
        sa.Column("worker_id", _token()),
        sa.Column("created_at", _instant(), nullable=False),
        sa.Column("available_at", _instant(), nullable=False),
        sa.Column("claimed_at", _instant()),
        sa.Column("finished_at", _instant(), nullable=False),
        sa.CheckConstraint("status IN ('succeeded', 'cancelled', 'expired')", name="queue_history_status"),
        schema=schema,
        sqlite_autoincrement=True,
    )
    op.create_index("queue_history_finished", "queue_history", ["queue", "finished_at", "id"], schema=schema)
    op.create_index("queue_history_age", "queue_history", ["finished_at"], schema=schema)
    op.create_index("queue_history_job", "queue_history", ["job_id"], schema=schema)
