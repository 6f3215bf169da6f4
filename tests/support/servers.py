"""A Postgres server that somebody else runs, with the same face as our own."""

from typing import Protocol

import psycopg
from psycopg import sql
from sqlalchemy import make_url


class Server(Protocol):
    """Where the tests make their databases."""

    @property
    def version(self) -> str: ...
    def url(self, database: str = "postgres") -> str: ...
    def create_database(self, name: str) -> None: ...
    def drop_database(self, name: str) -> None: ...
    def close(self) -> None: ...


class ExternalServer:
    """The server of TEST_DATABASE_URL, whose user may create databases."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url).set(drivername="postgresql+asyncpg")
        with self._connect() as connection:
            row = connection.execute("SHOW server_version").fetchone()
        self.version = str(row[0]) if row else "unknown"

    def url(self, database: str = "postgres") -> str:
        return self._url.set(database=database).render_as_string(hide_password=False)

    def create_database(self, name: str) -> None:
        with self._connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def drop_database(self, name: str) -> None:
        with self._connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def close(self) -> None:
        """It is not ours to stop."""

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        address = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(address, autocommit=True)
