"""From an engine to a backend. The only place that knows the backends' names."""

from importlib import import_module
from typing import Any, cast

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.checks import shown
from queue_core.clock import Clock
from queue_core.config import QueueConfig
from queue_core.errors import ConfigurationError, UnsupportedDatabase

_EXAMPLES = "sqlite+aiosqlite:///jobs.db or postgresql+asyncpg://user@host/database"


def connect(engine: AsyncEngine, config: QueueConfig, clock: Clock | None) -> Backend:
    """The backend of an engine, not opened yet; refuses an engine that can't carry a queue."""
    if isinstance(cast("object", engine), Engine):
        raise UnsupportedDatabase(
            "Queue needs an asynchronous engine and got a synchronous one:"
            f" use create_async_engine({_working(cast('Engine', engine).url)!r})"
        )
    if not isinstance(cast("object", engine), AsyncEngine):
        raise ConfigurationError(
            f"engine must be the result of create_async_engine({_EXAMPLES.split(' or ', maxsplit=1)[0]!r}),"
            f" got {shown(engine)}"
        )
    driver = engine.url.get_backend_name(), engine.url.get_driver_name()
    if driver == ("sqlite", "aiosqlite"):
        module: Any = import_module("queue_core.backends.sqlite")
        return cast("Backend", module.SqliteBackend(engine, config, clock))
    if driver == ("postgresql", "asyncpg"):
        module = import_module("queue_core.backends.postgres")
        return cast("Backend", module.PostgresBackend(engine, config, clock))
    raise UnsupportedDatabase(
        f"queue-core can't use {engine.url.drivername}: use create_async_engine({_working(engine.url)!r})"
    )


def _working(url: URL) -> str:
    """The URL that would have worked, without the password."""
    name = url.get_backend_name()
    if name == "sqlite":
        return url.set(drivername="sqlite+aiosqlite").render_as_string()
    if name in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+asyncpg", query={}).render_as_string()
    return _EXAMPLES
