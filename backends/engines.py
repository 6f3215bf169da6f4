"""Connections of our own, made the way the application's engine makes its.

A copy of the engine's pool keeps its URL, credentials, TLS and `connect` and `do_connect` events, but
shares no connection with it: the queue's traffic never waits for handlers that hold the whole pool.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sqlalchemy import PoolProxiedConnection, StaticPool
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from queue_core.errors import UnsupportedDatabase


def own_engine(engine: AsyncEngine) -> AsyncEngine:
    """An engine to the same database with a pool of its own."""
    if isinstance(engine.sync_engine.pool, StaticPool):
        raise UnsupportedDatabase(
            "an engine with poolclass=StaticPool has one connection for everybody, whose transactions would mix:"
            " leave poolclass out, or use NullPool"
        )
    return create_async_engine(engine.url, pool=engine.sync_engine.pool.recreate())


@asynccontextmanager
async def turn(lock: asyncio.Lock | asyncio.Semaphore, deadline: float) -> AsyncGenerator[None]:
    """The lock, or a `TimeoutError` at the deadline (by the loop's clock)."""
    async with asyncio.timeout_at(deadline):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


async def checkout(engine: AsyncEngine) -> PoolProxiedConnection:
    """A pooled connection, for its `driver_connection`."""
    return await engine.raw_connection()


async def give_back(connection: PoolProxiedConnection, *, broken: bool = False) -> None:
    """Return a connection to its pool; a broken one is closed for good."""
    # The pool's own code is synchronous and may wait for the driver.
    if broken:
        await greenlet_spawn(connection.invalidate)
    await greenlet_spawn(connection.close)
