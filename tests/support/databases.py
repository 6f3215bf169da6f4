"""The two databases as a test sees them: a URL to work on, and a way to look that is not the queue's own."""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import psycopg
from sqlalchemy import make_url

Kind: TypeAlias = Literal["sqlite", "postgres"]

TABLES = ("queue_jobs", "queue_dead_jobs", "queue_workers", "queue_pauses", "queue_ticks", "queue_history")


class Database(ABC):
    """One database, reached through a synchronous driver so that what a test sees owes nothing to the queue."""

    kind: ClassVar[Kind]

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """The rows of a statement, in a transaction of its own. Parameters are written as ?."""
        connection: Any = self.connect()
        try:
            cursor = connection.execute(self._spelt(sql), parameters)
            rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
            connection.commit()
            return rows
        finally:
            connection.close()

    def jobs(self, columns: str = "id") -> list[tuple[Any, ...]]:
        """Those columns of every job, by id."""
        return self.query(f"SELECT {columns} FROM queue_jobs ORDER BY id")

    def count(self, table: str = "queue_jobs") -> int:
        return int(self.query(f"SELECT count(*) FROM {table}")[0][0])

    @property
    @abstractmethod
    def sync_url(self) -> str:
        """The same database through a synchronous driver of SQLAlchemy."""

    @abstractmethod
    def connect(self) -> Any:
        """A connection of the synchronous driver, whose first statement begins a transaction."""

    @abstractmethod
    def _spelt(self, sql: str) -> str: ...


class SqliteDatabase(Database):
    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite+aiosqlite:///{path}")
        self.path = path

    @property
    def sync_url(self) -> str:
        return f"sqlite:///{self.path}"

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    def _spelt(self, sql: str) -> str:
        return sql


class PostgresDatabase(Database):
    kind = "postgres"

    @property
    def sync_url(self) -> str:
        return self.url.replace("+asyncpg", "+psycopg")

    def connect(self) -> "psycopg.Connection[Any]":
        return psycopg.connect(make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False))

    def _spelt(self, sql: str) -> str:
        return sql.replace("%", "%%").replace("?", "%s")

    def truncate(self, tables: Sequence[str] = TABLES) -> None:
        self.query(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY")
