"""One SQL text, two ways to run it: through SQLAlchemy, or on the driver's own connection.

In the caller's transaction a statement has to go through SQLAlchemy (with asyncpg, BEGIN is sent with
the first statement that does, so a raw one before it would run outside the transaction). On our own
connections the driver is called directly, which saves most of the cost of a small statement.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Dialect, TextClause, text


class Statement:
    """A statement with named parameters, written for one dialect."""

    def __init__(self, sql: str, dialect: Dialect) -> None:
        self.clause: TextClause = text(sql)
        compiled = self.clause.compile(dialect=dialect)
        self.driver_sql = str(compiled)
        self._names: Sequence[str] = compiled.positiontup or ()

    def arguments(self, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """The parameters in the order in which the driver takes them."""
        return [parameters[name] for name in self._names]


class Call(NamedTuple):
    """A statement and what to run it with."""

    statement: Statement
    parameters: Mapping[str, Any]
