"""Alembic's entry for whoever works on queue-core: `alembic -x url=sqlite:///scratch.db revision --autogenerate`.

Applications don't come through here: they call `queue_core.schema`, which runs the same revisions.
"""

from importlib import import_module

from alembic import context, op
from sqlalchemy import NullPool, create_engine

from queue_core.schema import VERSION_TABLE

arguments = context.get_x_argument(as_dictionary=True)
if "url" not in arguments:
    raise SystemExit("say which scratch database to use: alembic -x url=sqlite:///scratch.db …")

with create_engine(arguments["url"], poolclass=NullPool).connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=import_module("queue_core.backends.tables").build_tables().metadata,
        version_table=VERSION_TABLE,
    )
    with context.begin_transaction():
        context.run_migrations(op=op)
