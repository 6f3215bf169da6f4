"""Connections of our own, made the way the application's engine makes its.

A copy of the engine's pool keeps its URL, credentials, TLS and `connect` and `do_connect` events, but
shares no connection with it: the queue's traffic never waits for handlers that hold the whole pool.
"""

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn


def own_engine(engine: AsyncEngine) -> AsyncEngine:
    """An engine to the same database with a pool of its own."""
    return create_async_engine(engine.url, pool=engine.sync_engine.pool.recreate())


async def checkout(engine: AsyncEngine) -> PoolProxiedConnection:
    """A pooled connection, for its `driver_connection`."""
    return await engine.raw_connection()


async def give_back(connection: PoolProxiedConnection, *, broken: bool = False) -> None:
    """Return a connection to its pool; a broken one is closed for good."""
    # The pool's own code is synchronous and may wait for the driver.
    if broken:
        await greenlet_spawn(connection.invalidate)
    await greenlet_spawn(connection.close)
