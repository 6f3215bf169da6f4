"""Database URLs as hosting providers write them, turned into ones that an asynchronous engine takes."""

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from queue_core.errors import ConfigurationError, UnsupportedDatabase


def asynchronous_url(text: str) -> URL:
    """`postgres://…` and `postgresql://…` for asyncpg, with `sslmode` as `ssl`; `sqlite:///…` for aiosqlite."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        # Not the text itself: it may hold a password.
        raise ConfigurationError(
            "the database URL can't be read: write sqlite:///jobs.db or postgresql://user@host/database"
        ) from error
    name = url.drivername.partition("+")[0]
    if name == "sqlite":
        return url.set(drivername="sqlite+aiosqlite")
    if name in ("postgres", "postgresql"):
        query = {"ssl" if key == "sslmode" else key: value for key, value in url.query.items()}
        return url.set(drivername="postgresql+asyncpg", query=query)
    raise UnsupportedDatabase(
        f"queue-core can't use {url.drivername}: write sqlite:///jobs.db or postgresql://user@host/database"
    )
