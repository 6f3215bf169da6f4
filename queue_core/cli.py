"""The command `queue-core`.

Exit codes: 0 all is well, 1 a problem was found, 2 the command was not understood. What a command needs
is imported when it runs, so that `--help` answers at once.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    from queue_core.errors import ConfigurationError, QueueError

    # What a command has to say is its one line; warnings are for the application's log.
    logging.getLogger("queue_core").setLevel(logging.ERROR)
    try:
        return asyncio.run(_migrate(options))
    except ConfigurationError as error:
        print(f"queue-core: {error}", file=sys.stderr)
        return 2
    except QueueError as error:
        print(f"queue-core: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="queue-core", description="Durable background jobs in your database.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    migrate = commands.add_parser(
        "migrate",
        help="create or upgrade the tables",
        description="Create or upgrade the tables. Safe to run from several machines at once, and while workers run.",
        epilog="example: queue-core migrate --url postgresql://app@db.example/app",
    )
    migrate.add_argument(
        "--url", default=os.environ.get("QUEUE_CORE_URL"), help="the database (default: QUEUE_CORE_URL)"
    )
    migrate.add_argument("--schema", help="the Postgres schema of the tables")
    what = migrate.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; exit 1 when the tables are not up to date")
    what.add_argument("--sql", action="store_true", help="change nothing; print the statements for an empty database")
    return parser


async def _migrate(options: argparse.Namespace) -> int:
    from sqlalchemy.ext.asyncio import create_async_engine

    from queue_core.checks import check_identifier
    from queue_core.errors import ConfigurationError
    from queue_core.queue import Queue
    from queue_core.schema import head_revision, upgrade_sql
    from queue_core.urls import asynchronous_url

    if options.schema is not None:
        check_identifier(options.schema, "--schema")
    if not options.url:
        raise ConfigurationError("no database given: pass --url, or set QUEUE_CORE_URL")
    url = asynchronous_url(options.url)
    if options.schema is not None and url.get_backend_name() == "sqlite":
        raise ConfigurationError("--schema is for Postgres; SQLite has none: leave it out")
    if options.sql:
        print(upgrade_sql(url.get_backend_name(), options.schema))
        return 0
    engine: AsyncEngine = create_async_engine(url)
    try:
        async with Queue(engine, schema=options.schema, migrate=not options.check):
            print(f"the tables are at revision {head_revision()}")
    finally:
        await engine.dispose()
    return 0
