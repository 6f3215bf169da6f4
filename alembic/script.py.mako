"""${message}"""

import sqlalchemy as sa

from alembic.operations import Operations

# The number before the underscore goes up only when code that knows nothing of this revision can't
# work with the tables any more: such code then refuses to start.
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade(op: Operations, schema: str | None = None) -> None:
    ${upgrades if upgrades else "raise NotImplementedError"}


def downgrade(op: Operations, schema: str | None = None) -> None:
    ${downgrades if downgrades else "raise NotImplementedError"}
