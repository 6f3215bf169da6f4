"""From an engine to a backend. The only place that knows the backends' names."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.checks import shown
from queue_core.clock import Clock
from queue_core.config import QueueConfig
from queue_core.errors import ConfigurationError, UnsupportedDatabase

_EXAMPLES = ("sqlite+aiosqlite:///jobs.db", "postgresql+asyncpg://user@host/database")


def connect(engine: AsyncEngine, config: QueueConfig, clock: Clock | None) -> Backend:
    """The backend of an engine, not opened yet; refuses an engine that can't carry a queue."""
    if isinstance(cast("object", engine), Engine):
        raise UnsupportedDatabase(
            f"Queue needs an asynchronous engine and got a synchronous one: use {_working(cast('Engine', engine).url)}"
        )
    if isinstance(cast("object", engine), str | URL):
        # Without showing it: it may hold a password.
        raise ConfigurationError("engine must be an engine and not its URL: pass create_async_engine(url)")
    if not isinstance(cast("object", engine), AsyncEngine):
        raise ConfigurationError(
            f"engine must be the result of create_async_engine({_EXAMPLES[0]!r}), got {shown(engine)}"
        )
    driver = engine.url.get_backend_name(), engine.url.get_driver_name()
    if driver == ("sqlite", "aiosqlite"):
        module: Any = import_module("queue_core.backends.sqlite")
        return cast("Backend", module.SqliteBackend(engine, config, clock))
    if driver == ("postgresql", "asyncpg"):
        module = import_module("queue_core.backends.postgres")
        return cast("Backend", module.PostgresBackend(engine, config, clock))
    raise UnsupportedDatabase(f"queue-core can't use {engine.url.drivername}: use {_working(engine.url)}")


def _working(url: URL) -> str:
    """The call that would have worked, without the password."""
    name = url.get_backend_name()
    urls: Sequence[str] = _EXAMPLES
    if name == "sqlite" and url.database and ":memory:" not in url.database:
        urls = (url.set(drivername="sqlite+aiosqlite").render_as_string(),)
    elif name == "sqlite":
        urls = _EXAMPLES[:1]
    elif name == "postgresql":
        urls = (url.set(drivername="postgresql+asyncpg", query={}).render_as_string(),)
    return " or ".join(f"create_async_engine({working!r})" for working in urls)
