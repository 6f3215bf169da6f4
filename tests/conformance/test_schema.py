"""The tables: how they come to be, when they are missed, and the schema that they live in.

What is in a database is read from its own catalogue, and compared with what SQLAlchemy makes of the declared tables.
"""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from queue_core import ConfigurationError, EnqueueStatus, Queue, SchemaError, schema
from queue_core.schema import OUR_TABLES, VERSION_TABLE, head_revision
from tests.support.application import engine_to, init, opened
from tests.support.catalogue import (
    Catalogue,
    catalogue,
    declared_tables,
    dialect,
    differences,
    relations,
    revisions,
    run_script,
    transaction,
)
from tests.support.databases import Database, PostgresDatabase, SqliteDatabase
from tests.support.jobs import Note
from tests.support.processes import run_together
from tests.support.servers import Server
from tests.support.spy import Spy


@pytest.fixture
def declared(another_database: Database) -> Catalogue:
    """The catalogue of a database that was made from the declared tables alone."""
    with transaction(another_database) as connection:
        declared_tables().create_all(connection)
    return catalogue(another_database)


# From nothing to the tables


async def test_init_makes_exactly_the_declared_tables(empty_database: Database, declared: Catalogue) -> None:
    await init(empty_database)
    made = catalogue(empty_database)
    assert set(made) == OUR_TABLES
    assert {table: facts for table, facts in made.items() if table != VERSION_TABLE} == declared


async def test_alembic_finds_no_difference_between_the_declared_tables_and_those_of_init(
    empty_database: Database,
) -> None:
    await init(empty_database)
    assert differences(empty_database) == []
    empty_database.query("DROP INDEX queue_jobs_claimed")
    empty_database.query("ALTER TABLE queue_pauses DROP COLUMN reason")
    assert len(differences(empty_database)) == 2


async def test_the_tables_can_be_taken_away_and_made_again_beside_the_applications_own(
    empty_database: Database,
) -> None:
    _add_orders(empty_database)
    await init(empty_database)
    made = catalogue(empty_database)
    with transaction(empty_database) as connection:
        schema.downgrade(connection)
    assert relations(empty_database) == {"orders", "orders_note"}
    await init(empty_database)
    assert catalogue(empty_database) == made
    assert empty_database.query("SELECT id, note FROM orders") == [(1, "two pounds of tea")]


def test_eight_processes_that_start_at_once_on_an_empty_database_all_come_up(
    empty_database: Database, tmp_path: Path
) -> None:
    ends = run_together(8, _START, empty_database.url, cwd=tmp_path)
    assert ends == [(0, "")] * 8
    assert set(catalogue(empty_database)) == OUR_TABLES
    assert revisions(empty_database) == [head_revision()]
    assert empty_database.count() == 8


async def test_eight_queues_that_open_at_once_in_one_event_loop_all_come_up(empty_database: Database) -> None:
    await asyncio.gather(*(init(empty_database) for _ in range(8)))
    assert set(catalogue(empty_database)) == OUR_TABLES
    assert revisions(empty_database) == [head_revision()]
    assert empty_database.count() == 8


# Checking only


async def test_with_migrate_off_a_database_without_our_tables_is_refused_with_the_command_to_run(
    empty_database: Database,
) -> None:
    _add_orders(empty_database)
    with pytest.raises(SchemaError) as refusal:
        await init(empty_database, migrate=False)
    assert str(refusal.value) == (
        "the tables of queue-core are not in this database: run 'queue-core migrate --url URL',"
        " or leave out migrate=False to have it done at start"
    )
    assert relations(empty_database) == {"orders", "orders_note"}


@pytest.mark.sqlite_only("a database of Postgres is never made by connecting to it")
async def test_with_migrate_off_a_file_that_does_not_exist_is_refused_and_not_made(
    empty_database: SqliteDatabase,
) -> None:
    with pytest.raises(SchemaError) as refusal:
        await init(empty_database, migrate=False)
    assert str(refusal.value) == (
        f"the SQLite file {empty_database.path} does not exist: run 'queue-core migrate --url URL',"
        " or leave out migrate=False to have it made at start"
    )
    assert not empty_database.path.exists()


async def test_with_migrate_off_tables_that_are_up_to_date_are_used_as_they_are(empty_database: Database) -> None:
    await init(empty_database)
    await init(empty_database, migrate=False)
    assert empty_database.count() == 2


# As plain SQL


async def test_the_plain_sql_makes_the_same_tables_and_init_accepts_them(
    empty_database: Database, another_database: Database
) -> None:
    await init(another_database)
    run_script(empty_database, schema.upgrade_sql(dialect(empty_database)))
    assert catalogue(empty_database) == catalogue(another_database)
    await init(empty_database, migrate=False)
    assert revisions(empty_database) == [head_revision()]


@pytest.mark.postgres_only("SQLite has no schemas")
async def test_the_plain_sql_makes_the_chosen_schema_too(
    empty_database: PostgresDatabase, another_database: Database
) -> None:
    await init(another_database)
    run_script(empty_database, schema.upgrade_sql("postgresql", schema="order"))
    assert catalogue(empty_database, "order") == catalogue(another_database)
    await init(empty_database, schema="order", migrate=False)


# A chosen Postgres schema


@pytest.mark.postgres_only("SQLite has no schemas")
@pytest.mark.parametrize("name", ["MyJobs", "user", "order", "s" * 63])
async def test_everything_lives_in_the_chosen_schema(
    empty_database: PostgresDatabase, declared: Catalogue, name: str
) -> None:
    async with opened(empty_database, schema=name) as queue:
        await _enqueue_in_every_way(queue, empty_database)
        assert (await queue.counts())["notes"].pending == 6
    made = catalogue(empty_database, name)
    assert set(made) == OUR_TABLES
    assert {table: facts for table, facts in made.items() if table != VERSION_TABLE} == declared
    assert relations(empty_database) == set()
    await init(empty_database, schema=name, migrate=False)
    with transaction(empty_database) as connection:
        schema.downgrade(connection, name)
    assert relations(empty_database, name) == set()


@pytest.mark.postgres_only("SQLite has no schemas")
async def test_two_queues_in_two_schemas_of_one_database_do_not_see_each_other(
    empty_database: PostgresDatabase,
) -> None:
    async with (
        opened(empty_database, schema="one") as one,
        opened(empty_database, schema="two") as two,
        opened(empty_database) as neither,
    ):
        first = await one.enqueue(Note(), key="k")
        second = await two.enqueue(Note(), key="k")
        assert (first.status, second.status) == (EnqueueStatus.INSERTED, EnqueueStatus.INSERTED)
        await two.enqueue(Note())
        assert (await one.counts())["notes"].pending == 1
        assert (await two.counts())["notes"].pending == 2
        assert await neither.counts() == {}


@pytest.mark.postgres_only("SQLite has no schemas")
async def test_with_migrate_off_a_schema_without_tables_is_refused_with_its_own_command(
    empty_database: PostgresDatabase,
) -> None:
    await init(empty_database)
    with pytest.raises(SchemaError) as refusal:
        await init(empty_database, schema="MyJobs", migrate=False)
    assert str(refusal.value) == (
        "the tables of queue-core are not in this database in the schema 'MyJobs': run 'queue-core migrate --url URL"
        " --schema MyJobs', or leave out migrate=False to have it done at start"
    )
    assert empty_database.query("SELECT count(*) FROM pg_namespace WHERE nspname = 'MyJobs'") == [(0,)]


@pytest.mark.parametrize("name", ['x"; drop table t; --', "", "s" * 64, "a.b", "1st", "größe", "a\n"])
async def test_a_schema_name_that_is_no_plain_identifier_is_refused_before_anything_is_sent(
    server: Server, name: str
) -> None:
    engine = create_async_engine(server.url())
    spy = Spy(engine)
    with pytest.raises(ConfigurationError, match="schema must be a plain identifier"):
        await Queue.init(engine, schema=name)
    assert spy.connections == 0
    await engine.dispose()


@pytest.mark.sqlite_only("Postgres has schemas")
async def test_sqlite_has_no_schemas_to_choose_from(empty_database: SqliteDatabase) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        await init(empty_database, schema="jobs")
    assert str(refusal.value) == "schema='jobs' is for Postgres; SQLite has none: leave it out"
    assert not empty_database.path.exists()


# Helpers


async def _enqueue_in_every_way(queue: Queue, database: Database) -> None:
    await queue.enqueue(Note())
    await queue.enqueue(Note(), key="k")
    assert (await queue.enqueue(Note(), key="k")).status is EnqueueStatus.DUPLICATE
    assert (await queue.enqueue(Note(), key="k", key_mode="replace")).status is EnqueueStatus.REPLACED
    await queue.enqueue_many([Note(), Note()])
    async with engine_to(database) as engine:
        async with AsyncSession(engine) as session, session.begin():
            await queue.enqueue(Note(), session=session)
        async with engine.begin() as connection:
            await queue.enqueue(Note(), connection=connection)


def _add_orders(database: Database) -> None:
    database.query("CREATE TABLE orders (id integer, note text)")
    database.query("CREATE INDEX orders_note ON orders (note)")
    database.query("INSERT INTO orders VALUES (1, 'two pounds of tea')")


_START = """
import asyncio, logging, sys
from sqlalchemy.ext.asyncio import create_async_engine
from queue_core import Context, Job, Queue

class Note(Job):
    async def run(self, ctx: Context) -> None: ...

async def main():
    engine = create_async_engine(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
    queue = await Queue.init(engine, jobs=[Note])
    await Note().enqueue()
    await queue.close()
    await engine.dispose()

logging.disable(logging.WARNING)
asyncio.run(main())
"""
