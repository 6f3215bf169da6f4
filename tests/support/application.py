"""An application as tests need one: it opens a queue at its start, and may have an Alembic history of its own."""

import io
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

from alembic import command
from alembic.config import Config
from sqlalchemy import Column, Integer, MetaData, Table
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import Queue, schema
from queue_core.config import QueueSettings
from queue_core.schema import head_revision
from tests.support.databases import Database
from tests.support.jobs import Note, Other


@asynccontextmanager
async def engine_to(database: Database) -> AsyncGenerator[AsyncEngine]:
    engine = create_async_engine(database.url)
    try:
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def opened(database: Database, **settings: Unpack[QueueSettings]) -> AsyncGenerator[Queue]:
    async with engine_to(database) as engine, Queue(engine, jobs=[Note, Other], **settings) as queue:
        yield queue


async def init(database: Database, **settings: Unpack[QueueSettings]) -> None:
    """Open a queue as an application does at its start, and enqueue a job."""
    async with opened(database, **settings) as queue:
        await queue.enqueue(Note())


class Application:
    """An application with an Alembic history of its own, which begins with a table of orders."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        (folder / "versions").mkdir(parents=True)
        (folder / "env.py").write_text(_ENVIRONMENT)
        (folder / "versions" / "orders.py").write_text(_ORDERS)

    def add_our_tables(self, schema: str | None = None) -> None:
        """Write the migration that makes our tables."""
        (self._folder / "versions" / "jobs.py").write_text(_JOBS.format(schema=schema, revision=head_revision()))

    def upgrade(self, to: str) -> None:
        command.upgrade(self._config(), to)

    def downgrade(self, to: str) -> None:
        command.downgrade(self._config(), to)

    def sql_of(self, operation: Callable[..., None], revisions: str) -> str:
        output = io.StringIO()
        operation(self._config(output=output), revisions, sql=True)
        return output.getvalue()

    def check(self, *, filtered: bool) -> None:
        """Autogenerate, and raise what it would have written."""
        command.check(self._config(include_object=schema.include_object if filtered else None))

    def revisions(self) -> Sequence[str]:
        return [row[0] for row in self._database.query("SELECT version_num FROM alembic_version")]

    def _config(self, *, include_object: object = None, output: io.StringIO | None = None) -> Config:
        metadata = MetaData()
        Table("orders", metadata, Column("id", Integer, primary_key=True))
        config = Config(
            output_buffer=output,
            attributes={
                "url": self._database.sync_url,
                "options": {"target_metadata": metadata, "include_object": include_object},
            },
        )
        config.set_main_option("script_location", str(self._folder))
        return config


_ENVIRONMENT = """
from alembic import context
from sqlalchemy import NullPool, create_engine

url, options = context.config.attributes["url"], context.config.attributes["options"]
if context.is_offline_mode():
    context.configure(url=url, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
"""

_ORDERS = """
import sqlalchemy as sa
from alembic import op

revision = "orders"
down_revision = None

def upgrade():
    op.create_table("orders", sa.Column("id", sa.Integer, primary_key=True))

def downgrade():
    op.drop_table("orders")
"""

_JOBS = """
from alembic import op
from queue_core.schema import downgrade_with, upgrade_with

revision = "jobs"
down_revision = "orders"

def upgrade():
    upgrade_with(op, schema={schema!r}, to="{revision}")

def downgrade():
    downgrade_with(op, schema={schema!r}, start="{revision}")
"""
