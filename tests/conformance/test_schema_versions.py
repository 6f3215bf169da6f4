"""Tables of another version: brought up to date, used as they are, or refused; and the rights that this takes."""

import logging
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import ProgrammingError

from queue_core import BackendError, SchemaError, schema
from queue_core.schema import VERSION_TABLE, head_revision
from tests.support.application import init
from tests.support.catalogue import catalogue, relations, revisions, transaction
from tests.support.databases import Database, PostgresDatabase
from tests.support.processes import run_python

MIGRATE = ("-m", "queue_core", "migrate")


@pytest.fixture(scope="session")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a queue-core that has one revision more than this one, laid out as pip installs it."""
    folder = tmp_path_factory.mktemp("next_version")
    package = folder / "queue_core"
    for source, target in (
        (Path(schema.__file__).parent, package),
        (Path(str(import_module("queue_core.backends").__file__)).parent, package / "backends"),
        (schema.migrations_path(), package / "migrations"),
    ):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (package / "migrations" / "versions" / "next.py").write_text(_NEXT_REVISION.format(head=head_revision()))
    return folder


# Older tables


async def test_with_migrate_off_older_tables_are_refused_with_both_revisions(
    empty_database: Database, next_version: Path
) -> None:
    await init(empty_database)
    made = catalogue(empty_database)
    refusal = run_python(*MIGRATE, "--check", "--url", empty_database.url, cwd=next_version)
    assert refusal.stderr.splitlines()[-1] == (
        f"queue-core: the tables are at revision {head_revision()} and this version needs 1_8888:"
        " run 'queue-core migrate --url URL', or leave out migrate=False to have it done at start"
    )
    assert refusal.returncode == 1
    assert catalogue(empty_database) == made


async def test_a_later_revision_goes_up_and_down_again_and_keeps_the_jobs(
    empty_database: Database, next_version: Path
) -> None:
    await init(empty_database)
    jobs = empty_database.jobs("*")
    for _ in range(2):
        run_python(*MIGRATE, "--url", empty_database.url, cwd=next_version)
        assert revisions(empty_database) == ["1_8888"]
        assert empty_database.jobs("*") == [(*job, None) for job in jobs]
        run_python("-c", _DOWNGRADE, empty_database.sync_url, head_revision(), cwd=next_version)
        assert revisions(empty_database) == [head_revision()]
        assert empty_database.jobs("*") == jobs


# Newer tables, and none of ours


async def test_the_version_before_goes_on_after_a_rolling_deploy_with_a_warning(
    empty_database: Database, next_version: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_python(*MIGRATE, "--url", empty_database.url, cwd=next_version)
    await init(empty_database)
    (warning,) = _warnings(caplog)
    assert warning == (
        f"the tables are at revision 1_8888, newer than the {head_revision()} of this version of queue-core;"
        " it goes on, as they fit"
    )
    assert empty_database.count() == 1


@pytest.mark.parametrize("migrate", [True, False])
async def test_tables_that_are_newer_and_still_fit_are_used_with_one_warning(
    empty_database: Database, migrate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await init(empty_database)
    _set_revision(empty_database, "1_9999")
    await init(empty_database, migrate=migrate)
    assert len(_warnings(caplog)) == 1
    assert revisions(empty_database) == ["1_9999"]
    assert empty_database.count() == 2


@pytest.mark.parametrize("migrate", [True, False])
async def test_tables_of_a_later_generation_are_refused_with_the_advice_to_install_a_newer_version(
    empty_database: Database, migrate: bool
) -> None:
    await init(empty_database)
    _set_revision(empty_database, "2_0001")
    with pytest.raises(SchemaError) as refusal:
        await init(empty_database, migrate=migrate)
    assert str(refusal.value) == (
        "the tables are at revision 2_0001, which this version of queue-core can't work with"
        f" (it knows {head_revision()}): install the version that made them, or a newer one"
    )
    assert revisions(empty_database) == ["2_0001"]


async def test_a_revision_that_is_none_of_ours_is_refused(empty_database: Database) -> None:
    await init(empty_database)
    for revision in ("", "head", "5f2a9c01d3e4"):
        _set_revision(empty_database, revision)
        for migrate in (True, False):
            with pytest.raises(SchemaError) as refusal:
                await init(empty_database, migrate=migrate)
            assert str(refusal.value) == (
                f"the table queue_core_version says {revision!r}, which is no revision of queue-core:"
                " restore it, or drop our tables to have them made again"
            )


async def test_a_revision_that_only_begins_like_ours_is_refused(empty_database: Database) -> None:
    await init(empty_database)
    for revision in ("1", "1_", "1_x", "²_0001"):
        _set_revision(empty_database, revision)
        with pytest.raises(SchemaError, match="is no revision of queue-core"):
            await init(empty_database)


async def test_a_version_table_without_exactly_one_row_is_refused(empty_database: Database) -> None:
    await init(empty_database)
    for rows in ((), (head_revision(), "2_0001")):
        _set_revision(empty_database, *rows)
        for migrate in (True, False):
            with pytest.raises(SchemaError, match="queue_core_version"):
                await init(empty_database, migrate=migrate)


# Rights


@pytest.mark.postgres_only("SQLite has no roles")
async def test_tables_that_are_up_to_date_need_no_right_to_change_tables(empty_database: PostgresDatabase) -> None:
    await init(empty_database)
    with _as_role(
        empty_database,
        "USAGE ON SCHEMA public",
        "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public",
        "USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public",
    ) as clerk:
        with pytest.raises(ProgrammingError, match="permission denied"), transaction(clerk) as connection:
            connection.exec_driver_sql("CREATE TABLE t ()")
        await init(clerk)
        await init(clerk, migrate=False)
    assert empty_database.count() == 3


@pytest.mark.postgres_only("SQLite has no roles")
async def test_a_schema_that_was_made_beforehand_needs_no_right_to_make_schemas(
    empty_database: PostgresDatabase,
) -> None:
    empty_database.query("CREATE SCHEMA jobs")
    with _as_role(empty_database, "USAGE, CREATE ON SCHEMA jobs") as clerk:
        await init(clerk, schema="jobs")
        assert empty_database.count("jobs.queue_jobs") == 1


@pytest.mark.postgres_only("SQLite has no roles")
async def test_a_missing_right_to_make_tables_is_the_databases_refusal(empty_database: PostgresDatabase) -> None:
    with (
        _as_role(empty_database, "USAGE ON SCHEMA public") as clerk,
        pytest.raises(BackendError, match="permission denied for schema public"),
    ):
        await init(clerk)
    assert relations(empty_database) == set()


# Helpers


def _set_revision(database: Database, *rows: str) -> None:
    database.query(f"DELETE FROM {VERSION_TABLE}")
    for revision in rows:
        database.query(f"INSERT INTO {VERSION_TABLE} VALUES (?)", revision)


def _warnings(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == schema.__name__ and record.levelno >= logging.WARNING
    ]


@contextmanager
def _as_role(database: PostgresDatabase, *grants: str) -> Generator[PostgresDatabase]:
    """The same database, seen by a role that may do what is granted and nothing else."""
    role = f"queue_core_clerk_{os.getpid()}"
    database.query("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    database.query(f"CREATE ROLE {role} LOGIN PASSWORD 'open sesame'")
    try:
        for grant in grants:
            database.query(f"GRANT {grant} TO {role}")
        url = make_url(database.url).set(username=role, password="open sesame")
        yield PostgresDatabase(url.render_as_string(hide_password=False))
    finally:
        database.query(f"DROP OWNED BY {role}")
        database.query(f"DROP ROLE {role}")


_DOWNGRADE = """
import sys
from sqlalchemy import create_engine
from queue_core import schema

with create_engine(sys.argv[1]).begin() as connection:
    schema.downgrade(connection, to=sys.argv[2])
"""

_NEXT_REVISION = """
import sqlalchemy as sa

revision = "1_8888"
down_revision = "{head}"

def upgrade(op, schema=None):
    op.add_column("queue_jobs", sa.Column("colour", sa.Text()), schema=schema)

def downgrade(op, schema=None):
    op.drop_column("queue_jobs", "colour", schema=schema)
"""
