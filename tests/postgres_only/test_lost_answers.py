"""The answer to a COMMIT is lost: the job is there, the caller does not know, and tries again."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core import EnqueueStatus, Queue
from tests.support.databases import PostgresDatabase
from tests.support.jobs import Note
from tests.support.proxy import CommitCuttingProxy

pytestmark = pytest.mark.postgres_only("a network between the caller and the commit; SQLite has none")


def proxied(database: PostgresDatabase, should_cut: Callable[[str], bool]) -> CommitCuttingProxy:
    url = make_url(database.url)
    assert url.host is not None
    return CommitCuttingProxy(url.host, url.port or 5432, should_cut)


def through(proxy: CommitCuttingProxy, database: PostgresDatabase) -> str:
    url = make_url(database.url).set(host="127.0.0.1", port=proxy.port)
    return url.render_as_string(hide_password=False)


@pytest.mark.parametrize("mode", [None, "keep", "replace", "preserve_run_at"])
async def test_an_enqueue_whose_answer_was_cut_off_leaves_one_job(database: PostgresDatabase, mode: str | None) -> None:
    cut = itertools.cycle([True, False])
    async with proxied(database, lambda sql: "INSERT INTO" in sql and next(cut)) as proxy:
        engine = create_async_engine(through(proxy, database))
        async with Queue(engine, jobs=[Note]) as queue:
            for number in range(10):
                delivery: Any = {} if mode is None else {"key": str(number), "key_mode": mode}
                enqueued = await queue.enqueue(Note(text=str(number)), **delivery)
                assert enqueued.status is EnqueueStatus.INSERTED
        await engine.dispose()
        assert len(proxy.cuts) == 10
    assert database.jobs("payload") == [(f'{{"text":"{number}"}}',) for number in range(10)]


async def test_a_bulk_whose_commit_was_cut_off_is_there_once(database: PostgresDatabase) -> None:
    cut = itertools.chain([True, True], itertools.repeat(False))
    async with proxied(database, lambda sql: sql.startswith("COMMIT") and next(cut)) as proxy:
        engine = create_async_engine(through(proxy, database))
        async with Queue(engine, jobs=[Note]) as queue:
            answers = await queue.enqueue_many(Note(text=str(number)) for number in range(5_000))
        await engine.dispose()
        assert len(proxy.cuts) == 2
    assert {answer.status for answer in answers} == {EnqueueStatus.INSERTED}
    assert [answer.job_id for answer in answers] == [job_id for (job_id,) in database.jobs("id")]
    assert database.count() == 5_000


async def test_concurrent_enqueues_through_a_bad_line_lose_and_double_nothing(database: PostgresDatabase) -> None:
    numbers = itertools.count()
    async with proxied(database, lambda sql: "INSERT INTO" in sql and next(numbers) % 3 == 0) as proxy:
        engine = create_async_engine(through(proxy, database))
        async with Queue(engine, jobs=[Note]) as queue:
            for _ in range(10):
                await asyncio.gather(*(queue.enqueue(Note(), key=f"{n}" if n % 2 else None) for n in range(20)))
                database.query("UPDATE queue_jobs SET unique_key = NULL")
        await engine.dispose()
        assert len(proxy.cuts) >= 5
    assert database.count() == 200


async def test_a_server_that_ends_our_connections_is_asked_again(database: PostgresDatabase) -> None:
    engine = create_async_engine(database.url)
    async with Queue(engine, jobs=[Note]) as queue:
        for _ in range(5):
            await queue.enqueue(Note())
            database.query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await queue.enqueue(Note())
            assert (await queue.counts())["notes"].pending
    await engine.dispose()
    assert database.count() == 10
