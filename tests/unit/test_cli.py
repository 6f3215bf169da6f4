"""The command, run as a user runs it."""

from pathlib import Path

import pytest
from sqlalchemy import make_url

from queue_core.schema import head_revision
from tests.support.catalogue import run_script
from tests.support.databases import Database, SqliteDatabase
from tests.support.processes import Finished, run_python

ROOT = Path(__file__).parents[2]
AT_HEAD = f"the tables are at revision {head_revision()}\n"


def queue_core(*arguments: str, **variables: str) -> Finished:
    return run_python("-m", "queue_core", *arguments, cwd=ROOT, **variables)


def url(database: Database) -> str:
    """The URL as people write it: without a driver."""
    return database.url.replace("+aiosqlite", "").replace("+asyncpg", "")


def tables(database: Database) -> set[str]:
    catalogue = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table'",
        "postgres": "SELECT table_schema || '.' || table_name FROM information_schema.tables",
    }
    names = {str(name).removeprefix("public.") for (name,) in database.query(catalogue[database.kind])}
    return {name for name in names if "queue_" in name}


def complaint(result: Finished) -> str:
    """The one line on stderr, with which a command ends that could not do its work."""
    assert result.stdout == ""
    assert result.stderr.startswith("queue-core: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("queue-core: ").rstrip("\n")


# migrate


def test_migrate_makes_the_tables_and_may_be_repeated(empty_database: Database) -> None:
    for _ in range(2):
        result = queue_core("migrate", "--url", url(empty_database))
        assert (result.returncode, result.stdout, result.stderr) == (0, AT_HEAD, "")
    assert {"queue_jobs", "queue_core_version"} <= tables(empty_database)


def test_check_changes_nothing_and_exits_1_until_the_tables_are_there(empty_database: Database) -> None:
    result = queue_core("migrate", "--check", "--url", url(empty_database))
    assert result.returncode == 1
    assert ": run 'queue-core migrate --url URL'" in complaint(result)
    assert tables(empty_database) == set()
    queue_core("migrate", "--url", url(empty_database))
    result = queue_core("migrate", "--check", "--url", url(empty_database))
    assert (result.returncode, result.stdout, result.stderr) == (0, AT_HEAD, "")


@pytest.mark.sqlite_only("a database is a file")
def test_check_makes_no_file(empty_database: SqliteDatabase) -> None:
    assert queue_core("migrate", "--check", "--url", url(empty_database)).returncode == 1
    assert not empty_database.path.exists()


def test_sql_is_a_script_that_does_what_migrate_does(empty_database: Database) -> None:
    result = queue_core("migrate", "--sql", "--url", url(empty_database))
    assert (result.returncode, result.stderr) == (0, "")
    assert "CREATE TABLE queue_jobs (" in result.stdout
    assert tables(empty_database) == set()
    run_script(empty_database, result.stdout)
    assert queue_core("migrate", "--check", "--url", url(empty_database)).stdout == AT_HEAD


@pytest.mark.postgres_only("schemas")
def test_migrate_makes_the_tables_in_a_schema(empty_database: Database) -> None:
    where = ("--schema", "jobs", "--url", url(empty_database))
    before = complaint(queue_core("migrate", "--check", *where))
    assert before.startswith("the tables of queue-core are not in this database in the schema 'jobs': run 'queue-core")
    assert queue_core("migrate", *where).stdout == AT_HEAD
    assert "jobs.queue_jobs" in tables(empty_database)
    assert "queue_jobs" not in tables(empty_database)
    assert queue_core("migrate", "--check", *where).returncode == 0


def test_the_database_may_be_named_in_the_environment(tmp_path: Path) -> None:
    result = queue_core("migrate", QUEUE_CORE_URL=f"sqlite:///{tmp_path}/jobs.db")
    assert (result.returncode, result.stdout) == (0, AT_HEAD)
    assert (tmp_path / "jobs.db").exists()


# What can't be done

UNREADABLE = "the database URL can't be read: write sqlite:///jobs.db or postgresql://user@host/database"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no database given: pass --url, or set QUEUE_CORE_URL"),
        (("--url", "not a url with hunter2"), UNREADABLE),
        (("--url", "postgresql://u:hunter2@127.0.0.1:port/d"), UNREADABLE),
        (
            ("--url", "mysql://u:hunter2@h/d"),
            "queue-core can't use mysql: write sqlite:///jobs.db or postgresql://user@host/database",
        ),
        (
            ("--url", "sqlite:///jobs.db", "--schema", "a b"),
            (
                "--schema must be a plain identifier (a letter or _, then letters, digits or _, at most 63 in all),"
                " got 'a b'"
            ),
        ),
        (
            ("--url", "sqlite:///jobs.db", "--schema", "jobs", "--sql"),
            "--schema is for Postgres; SQLite has none: leave it out",
        ),
    ],
    ids=["no database", "no URL", "no port", "another database", "no schema name", "a schema in SQLite"],
)
def test_a_command_that_was_not_understood_exits_2_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = queue_core("migrate", *arguments)
    assert result.returncode == 2
    assert complaint(result) == message


@pytest.mark.parametrize("check", [(), ("--check",)], ids=["migrate", "check"])
def test_a_folder_that_is_not_there_is_named(tmp_path: Path, check: tuple[str, ...]) -> None:
    file = tmp_path / "missing" / "jobs.db"
    result = queue_core("migrate", *check, "--url", f"sqlite:///{file}")
    assert result.returncode == 2
    assert complaint(result) == f"the folder of the SQLite file {file} does not exist: create {file.parent} first"


def test_a_file_that_is_no_database_is_refused_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello\n" * 1_000)
    result = queue_core("migrate", "--url", f"sqlite:///{file}")
    assert result.returncode == 1
    assert complaint(result) == "the database refused (DatabaseError: file is not a database)"


@pytest.mark.postgres_only("a server, and passwords")
def test_a_database_that_is_not_there_exits_1_with_one_line_and_no_password(empty_database: Database) -> None:
    address = make_url(url(empty_database)).set(password="hunter2", database="no_such_database")
    result = queue_core("migrate", "--url", address.render_as_string(hide_password=False))
    assert result.returncode == 1
    assert "no_such_database" in complaint(result)
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize("arguments", [(), ("frobnicate",), ("migrate", "--check", "--sql"), ("migrate", "--frob")])
def test_a_wrong_command_line_exits_2_with_its_usage(arguments: tuple[str, ...]) -> None:
    result = queue_core(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: queue-core ")
    assert "Traceback" not in result.stderr


# Help


@pytest.mark.parametrize("arguments", [("--help",), ("migrate", "--help")])
def test_help_is_printed(arguments: tuple[str, ...]) -> None:
    result = queue_core(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: queue-core ")


def test_help_does_not_wait_for_sqlalchemy_to_be_imported() -> None:
    result = queue_core("--help", PYTHONPROFILEIMPORTTIME="1")
    assert "queue_core.cli" in result.stderr
    assert "sqlalchemy" not in result.stderr
