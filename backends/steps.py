"""An operation as the calls that it makes, apart from how a statement is sent.

It is a generator that yields a call and is sent the rows. So the same steps run asynchronously on the
driver's own connection and synchronously in a caller's transaction, and they read like what they do.
"""

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from .statement import Call

T = TypeVar("T")

Rows: TypeAlias = Sequence[Sequence[Any]]
Steps: TypeAlias = Generator[Call, Rows, T]
