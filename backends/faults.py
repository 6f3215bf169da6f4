"""What a driver's error means: try again later, or never; and for whom.

`except OperationalError` catches none of what a Postgres restart throws through asyncpg: those are bare
`DBAPIError`s, `InterfaceError`s, and `ConnectionRefusedError` or `TimeoutError` with no wrapping at all.
"""

import sqlite3
from typing import Any

import sqlalchemy.exc

from queue_core.errors import BackendError, BackendUnavailable, JobRefused, KeyLocked, QueueError

_TRANSIENT_STATES = (
    "08",  # the connection broke
    "57P01",  # the server shuts down
    "57P02",
    "57P03",  # it starts up
    "57014",  # the statement was cancelled by a timeout
    "53300",  # too many connections
    "53100",  # disk full
    "40001",  # serialisation
    "40P01",  # deadlock
    "55P03",  # lock timeout
    "25006",  # read only: a standby that is about to be promoted
    "25P03",  # idle in transaction for too long
)
_TRANSIENT_NAMES = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN")
# About one row's content: a constraint or trigger that the application added, a value that does not fit.
_REFUSED_STATES = ("22", "23", "54", "P0001")
_REFUSED_NAMES = ("SQLITE_CONSTRAINT", "SQLITE_TOOBIG", "SQLITE_MISMATCH")
_LOCK_TIMEOUT = "55P03"


def origin(error: Exception) -> Exception:
    """The driver's own error, without what would show a payload: SQLAlchemy's parameters, Postgres's detail."""
    cause: BaseException = error
    while isinstance(cause, sqlalchemy.exc.DBAPIError) and cause.orig is not None:
        cause = cause.orig
    # SQLAlchemy's asyncpg adapter wraps once more, with the real one as the cause.
    if hasattr(cause, "sqlstate") and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    postgres: Any = cause
    if getattr(postgres, "detail", None):
        # The whole row, which asyncpg puts into the text of the error.
        postgres.detail = None
    return cause if isinstance(cause, Exception) else error


def _code(cause: Exception) -> tuple[str, str]:
    """The state of Postgres and the name of SQLite; either may be empty."""
    return str(getattr(cause, "sqlstate", None) or ""), str(getattr(cause, "sqlite_errorname", None) or "")


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return True
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated:
        return True
    cause = origin(error)
    if isinstance(cause, OSError | TimeoutError):
        return True
    state, name = _code(cause)
    if state or name:
        return state.startswith(_TRANSIENT_STATES) or name.startswith(_TRANSIENT_NAMES)
    # asyncpg's client side ("connection is closed") and SQLAlchemy's adapter of it have no state; asyncpg is not
    # imported here, so that SQLite users need not have it.
    return type(cause).__name__ in ("InterfaceError", "InternalClientError", "ConnectionDoesNotExistError")


def is_answer(error: Exception) -> bool:
    """Whether it says for certain that nothing was written: the database refused, or was never reached."""
    cause = origin(error)
    state, name = _code(cause)
    if state:
        return not state.startswith(("08", "57P"))
    return bool(name) or isinstance(cause, ConnectionRefusedError)


def is_drivers(error: Exception) -> bool:
    """Whether it comes from the database and not from a mistake in code."""
    if isinstance(error, sqlite3.Error | OSError | TimeoutError):
        return True
    # By name: some of SQLAlchemy's adapters' errors are no SQLAlchemyError.
    return type(error).__module__.partition(".")[0] in ("asyncpg", "sqlalchemy")


def translate(error: Exception) -> Exception:
    """The error that a caller sees, to be raised from `origin(error)`; a mistake in code stays as it is."""
    if isinstance(error, QueueError) or not is_drivers(error):
        return error
    cause = origin(error)
    told = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    state, name = _code(cause)
    if state == _LOCK_TIMEOUT:
        return KeyLocked(
            f"another transaction holds the same unique key and has not ended ({told}):"
            " commit or roll it back, and enqueue again"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return BackendUnavailable(
            f"another connection keeps the SQLite file locked ({told}): end its write transaction;"
            " if it is your own, pass session= or connection= to enqueue inside it"
        )
    if is_transient(error):
        return BackendUnavailable(f"the database can't be reached or is busy ({told}): try again later")
    if state.startswith(_REFUSED_STATES) or name.startswith(_REFUSED_NAMES):
        return JobRefused(f"the database refused the job ({told}): see the rules that were added to the table")
    return BackendError(f"the database refused ({told})")


def translate_in_transaction(error: Exception) -> Exception:
    """The same for the caller's own transaction, which can't be tried again by us."""
    told = translate(error)
    if type(told) is BackendUnavailable and told is not error:
        cause = origin(error)
        return BackendUnavailable(
            f"your transaction has failed ({type(cause).__name__}: {cause}): roll it back and repeat it"
        )
    return told
