"""What is in a database, by its own catalogue, and what the declared tables would put there.

For comparing two databases, or one with the tables as SQLAlchemy makes them.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from typing import Any, TypeAlias

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, NullPool, create_engine, make_url

from queue_core.schema import VERSION_TABLE
from tests.support.databases import Database, SqliteDatabase

Catalogue: TypeAlias = Mapping[str, Sequence[tuple[Any, ...]]]


def catalogue(database: Database, schema: str = "public") -> Catalogue:
    """What the database's own catalogue says about each table, in an order that can be compared."""
    if isinstance(database, SqliteDatabase):
        return _sqlite_catalogue(database)
    return _postgres_catalogue(database, schema)


def _sqlite_catalogue(database: Database) -> Catalogue:
    facts: dict[str, Sequence[tuple[Any, ...]]] = {}
    for (table,) in database.query("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"):
        statements = database.query("SELECT name, sql FROM sqlite_master WHERE tbl_name = ? ORDER BY name", table)
        columns = database.query(f"PRAGMA table_info({table})")
        facts[table] = [*((name, " ".join((sql or "").split())) for name, sql in statements), *columns]
    return facts


def _postgres_catalogue(database: Database, schema: str) -> Catalogue:
    facts: dict[str, Sequence[tuple[Any, ...]]] = {}
    tables = database.query(
        "SELECT oid, relname, reloptions FROM pg_class"
        " WHERE relkind = 'r' AND relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?)",
        schema,
    )
    for oid, table, options in tables:
        columns = database.query(
            "SELECT attname, format_type(atttypid, atttypmod), attnotnull, attidentity, pg_get_expr(adbin, adrelid)"
            " FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
            " WHERE attrelid = ? AND attnum > 0 ORDER BY attnum",
            oid,
        )
        constraints = database.query(
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = ? ORDER BY conname", oid
        )
        indexes = database.query(
            "SELECT replace(indexdef, quote_ident(schemaname) || '.', '') FROM pg_indexes"
            " WHERE schemaname = ? AND tablename = ? ORDER BY indexname",
            schema,
            table,
        )
        facts[table] = [("options", options), *columns, *constraints, *indexes]
    return facts


def relations(database: Database, schema: str = "public") -> set[str]:
    """Every name there is: tables, indexes, sequences."""
    if isinstance(database, SqliteDatabase):
        return {row[0] for row in database.query("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'")}
    found = database.query(
        "SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?)", schema
    )
    return {row[0] for row in found}


def revisions(database: Database) -> Sequence[str]:
    return [row[0] for row in database.query(f"SELECT version_num FROM {VERSION_TABLE}")]


def declared_tables() -> MetaData:
    tables: Any = import_module("queue_core.backends.tables")
    metadata: MetaData = tables.build_tables().metadata
    return metadata


def differences(database: Database) -> Sequence[object]:
    """What Alembic would change to bring the database to the declared tables."""
    with transaction(database) as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        found: Sequence[object] = compare_metadata(context, declared_tables())
        return found


@contextmanager
def transaction(database: Database) -> Generator[Connection]:
    """One of the synchronous driver, through SQLAlchemy."""
    engine = create_engine(database.sync_url, poolclass=NullPool)
    with engine.begin() as connection:
        yield connection


def run_script(database: Database, script: str) -> None:
    """Run many statements as an operator does, through the plain driver."""
    with closing(database.connect()) as connection:
        if isinstance(database, SqliteDatabase):
            connection.executescript(script)
        else:
            connection.autocommit = True
            connection.execute(script)


def dialect(database: Database) -> str:
    return make_url(database.url).get_backend_name()
