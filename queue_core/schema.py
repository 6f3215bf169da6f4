"""The tables' revisions: which one a database is at, how to bring it to another, and as plain SQL.

Revisions are named `<generation>_<number>`. Code that meets a database newer than itself goes on with a
warning while the generation is its own (a rolling deploy, a roll-back), and refuses when it is higher:
a revision that old code can't live with raises the generation. The name alone is in the database, so it
has to carry this.

Revisions get their `op` as an argument and never use Alembic's module-level one, which belongs to
whoever runs Alembic at this moment: several queues may be opened at once, and an application may call
`upgrade_with` from a migration of its own.
"""

import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection

from queue_core.errors import SchemaError

VERSION_TABLE: Final = "queue_core_version"
OUR_TABLES: Final = frozenset(
    {
        "queue_jobs",
        "queue_dead_jobs",
        "queue_workers",
        "queue_pauses",
        "queue_ticks",
        "queue_history",
        VERSION_TABLE,
    }
)

_REVISION: Final = re.compile(r"([0-9]+)_[0-9]+")

_log = logging.getLogger(__name__)


def migrations_path() -> Path:
    """Where the revisions are: inside the installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "migrations"
    # Not importlib.resources: it fails in an editable install.
    return installed if installed.is_dir() else Path(__file__).parent.parent / "alembic"


def _revisions() -> ScriptDirectory:
    return ScriptDirectory(str(migrations_path()))


def head_revision() -> str:
    """The revision that this version of the code needs."""
    return str(_revisions().get_current_head())


def current_revision(connection: Connection, schema: str | None = None) -> str | None:
    """The revision that the database is at; None when our tables are not there."""
    if not sa.inspect(connection).has_table(VERSION_TABLE, schema=schema):
        return None
    revisions: Sequence[str] = connection.scalars(sa.select(_version_table(schema).c.version_num)).all()
    if len(revisions) != 1:
        raise SchemaError(
            f"the table {VERSION_TABLE} has {len(revisions)} rows in place of one: restore it, or drop our tables to"
            " have them made again"
        )
    return revisions[0]


def is_current(revision: str | None) -> bool:
    """Whether a database at this revision can be used as it is; a `SchemaError` if it is beyond this code."""
    if revision is None:
        return False
    if revision in _names(_revisions()):
        return revision == head_revision()
    generation, ours = _generation(revision), _generation(head_revision())
    if generation > ours:
        raise SchemaError(
            f"the tables are at revision {revision}, which this version of queue-core can't work with"
            f" (it knows {head_revision()}): install the version that made them, or a newer one"
        )
    _log.warning(
        "the tables are at revision %s, newer than the %s of this version of queue-core; it goes on, as they fit",
        revision,
        head_revision(),
    )
    return True


def check(connection: Connection, schema: str | None = None) -> None:
    """Refuse tables that are missing or too old, and say which command to run."""
    revision = current_revision(connection, schema)
    if is_current(revision):
        return
    where = f" in the schema {schema!r}" if schema else ""
    option = f" --schema {schema}" if schema else ""
    problem = (
        f"the tables of queue-core are not in this database{where}"
        if revision is None
        else f"the tables{where} are at revision {revision} and this version needs {head_revision()}"
    )
    raise SchemaError(
        f"{problem}: run 'queue-core migrate --url URL{option}', or leave out migrate=False to have it done at start"
    )


def upgrade(connection: Connection, schema: str | None = None, to: str = "head") -> None:
    """Bring the tables up, in the connection's transaction. The caller keeps others from doing it at once."""
    current = current_revision(connection, schema)
    if current not in (None, *_names(_revisions())):
        is_current(current)  # newer than this code: refused, or fine as it is
        return
    upgrade_with(_operations(connection), schema=schema, start=current, to=to)


def downgrade(connection: Connection, schema: str | None = None, to: str = "base") -> None:
    """Take the tables back to an older revision, in the connection's transaction; "base" removes them."""
    current = current_revision(connection, schema)
    if current is not None:
        downgrade_with(_operations(connection), schema=schema, start=current, to=to)


def upgrade_with(op: Any, *, schema: str | None = None, start: str | None = None, to: str = "head") -> None:
    """Run our revisions from a migration of the application's own: hand in its `alembic.op`.

    From `start` (None is an empty database) to `to`. Name `to`, so that the migration does the same when
    a newer queue-core is installed. Works in Alembic's offline mode as well.
    """
    steps = _between(start, to)
    if start is None:
        op.create_table(
            VERSION_TABLE,
            sa.Column("version_num", sa.String(32), nullable=False),
            sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
            schema=schema,
        )
    for script in steps:
        script.module.upgrade(op=op, schema=schema)
    if steps:
        _record(op, schema, steps[-1].revision)


def downgrade_with(op: Any, *, schema: str | None = None, start: str | None = None, to: str = "base") -> None:
    """The way back of `upgrade_with`, from `start` (None is this version's own revision) to `to`."""
    if to == "base" and start is None:
        start = head_revision()
    for script in reversed(_between(None if to == "base" else to, start or "head")):
        script.module.downgrade(op=op, schema=schema)
    if to == "base":
        op.drop_table(VERSION_TABLE, schema=schema)
    else:
        _record(op, schema, to)


def upgrade_sql(dialect: str, schema: str | None = None, start: str | None = None, to: str = "head") -> str:
    """The statements of `upgrade`, as a script to read or to run by hand."""
    output = io.StringIO()
    context = MigrationContext.configure(
        dialect_name=dialect, opts={"as_sql": True, "output_buffer": output, "transactional_ddl": True}
    )
    with context.begin_transaction():
        if schema is not None:
            context.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
        upgrade_with(Operations(context), schema=schema, start=start, to=to)
    return output.getvalue()


def include_object(item: object, name: str | None, type_: str, reflected: bool, compare_to: object | None) -> bool:
    """For the `include_object` of an application's own Alembic: leaves our tables and their indexes alone."""
    table = name if type_ == "table" else getattr(getattr(item, "table", None), "name", None)
    return table not in OUR_TABLES


def _operations(connection: Connection) -> Operations:
    return Operations(MigrationContext.configure(connection=connection, opts={"transactional_ddl": True}))


def _names(revisions: ScriptDirectory) -> Sequence[str]:
    return [script.revision for script in revisions.walk_revisions()]


def _between(start: str | None, to: str) -> Sequence[Script]:
    """The revisions after `start` up to `to`, oldest first."""
    return list(_revisions().iterate_revisions(to, start or "base"))[::-1]


def _generation(revision: str) -> int:
    if known := _REVISION.fullmatch(revision):
        return int(known[1])
    raise SchemaError(
        f"the table {VERSION_TABLE} says {revision!r}, which is no revision of queue-core: restore it, or drop our"
        " tables to have them made again"
    )


def _version_table(schema: str | None) -> sa.Table:
    return sa.Table(VERSION_TABLE, sa.MetaData(schema=schema), sa.Column("version_num", sa.String(32)))


def _record(op: Any, schema: str | None, revision: str) -> None:
    table = _version_table(schema)
    op.execute(table.delete())
    op.execute(table.insert().values(version_num=op.inline_literal(revision)))
