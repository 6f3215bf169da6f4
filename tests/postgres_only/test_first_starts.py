"""First starts under whatever isolation, search path or rights the application has."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core import Queue, WrongDatabase
from tests.support.databases import PostgresDatabase
from tests.support.jobs import Note

pytestmark = pytest.mark.postgres_only("isolation levels, search paths and roles")

ENGINES: dict[str, dict[str, Any]] = {
    "serializable": {"isolation_level": "SERIALIZABLE"},
    "repeatable read": {"isolation_level": "REPEATABLE READ"},
    "autocommit": {"isolation_level": "AUTOCOMMIT"},
    "serializable by default": {"connect_args": {"server_settings": {"default_transaction_isolation": "serializable"}}},
}


@pytest.mark.parametrize("isolation", ENGINES)
async def test_eight_queues_that_open_at_once_come_up_under_any_isolation(
    empty_database: PostgresDatabase, isolation: str
) -> None:
    engines = [create_async_engine(empty_database.url, **ENGINES[isolation]) for _ in range(8)]
    queues = await asyncio.gather(*(Queue(engine, jobs=[Note]).open() for engine in engines))
    await asyncio.gather(*(queue.enqueue(Note(), key="k") for queue in queues))
    for queue, engine in zip(queues, engines, strict=True):
        await queue.close()
        await engine.dispose()
    assert empty_database.count() == 1


async def test_a_schema_may_be_named_by_one_and_meant_by_another(empty_database: PostgresDatabase) -> None:
    engines = [create_async_engine(empty_database.url) for _ in range(8)]
    queues = await asyncio.gather(
        *(
            Queue(engine, jobs=[Note], schema="public" if number % 2 else None).open()
            for number, engine in enumerate(engines)
        )
    )
    await asyncio.gather(*(queue.enqueue(Note()) for queue in queues))
    for queue, engine in zip(queues, engines, strict=True):
        await queue.close()
        await engine.dispose()
    assert empty_database.count() == 8


async def test_another_search_path_of_the_caller_leads_to_no_other_table(empty_database: PostgresDatabase) -> None:
    engine = create_async_engine(empty_database.url)
    async with Queue(engine, schema="tenant_1"), Queue(engine, jobs=[Note]) as queue:
        async with engine.begin() as connection:
            await connection.execute(text("SET LOCAL search_path TO tenant_1"))
            await queue.enqueue(Note(), connection=connection, key="k")
        assert (await queue.counts())["notes"].pending == 1
    await engine.dispose()
    assert (empty_database.count("public.queue_jobs"), empty_database.count("tenant_1.queue_jobs")) == (1, 0)


async def test_without_the_right_to_ask_for_the_servers_identity_only_other_addresses_are_refused(
    empty_database: PostgresDatabase,
) -> None:
    empty_database.query("CREATE ROLE humble LOGIN")
    empty_database.query("GRANT CREATE ON SCHEMA public TO humble")
    empty_database.query("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    try:
        url = empty_database.url.replace("postgres@", "humble@")
        engine, same = create_async_engine(url), create_async_engine(url)
        other = create_async_engine(url.replace("127.0.0.1", "localhost"))
        async with Queue(engine, jobs=[Note]) as queue:
            async with same.begin() as connection:
                await queue.enqueue(Note(), connection=connection)
            async with other.connect() as connection:
                with pytest.raises(WrongDatabase, match="use the same address for both, or grant it"):
                    await queue.enqueue(Note(), connection=connection)
        for each in (engine, same, other):
            await each.dispose()
    finally:
        empty_database.query("DROP OWNED BY humble")
        empty_database.query("DROP ROLE humble")
