"""What a driver's error means: try again later, or never.

`except OperationalError` catches none of what a Postgres restart throws through asyncpg: those are bare
`DBAPIError`s, `InterfaceError`s, and `ConnectionRefusedError` or `TimeoutError` with no wrapping at all.
"""

import sqlalchemy.exc

from queue_core.errors import BackendError, BackendUnavailable, KeyLocked, QueueError

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
_LOCK_TIMEOUT = "55P03"


def origin(error: BaseException) -> BaseException:
    """The driver's own error, out of SQLAlchemy's wrapping."""
    while isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig is not None:
        error = error.orig
    # SQLAlchemy's asyncpg adapter wraps once more, with the real one as the cause.
    if not isinstance(error, QueueError) and hasattr(error, "sqlstate") and error.__cause__ is not None:
        return error.__cause__
    return error


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, OSError | TimeoutError | sqlalchemy.exc.TimeoutError):
        return True
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated:
        return True
    cause = origin(error)
    if isinstance(cause, OSError | TimeoutError):
        return True
    state: object = getattr(cause, "sqlstate", None)
    name: object = getattr(cause, "sqlite_errorname", None)
    if isinstance(state, str) and state:
        return state.startswith(_TRANSIENT_STATES)
    if isinstance(name, str) and name:
        return name.startswith(_TRANSIENT_NAMES)
    # asyncpg's client side ("connection is closed") and SQLAlchemy's adapter of it have no state; neither is
    # imported here, so that SQLite users need not have it.
    return type(cause).__name__ in ("InterfaceError", "InternalClientError", "ConnectionDoesNotExistError")


def translate(error: Exception) -> QueueError:
    """The error that a caller sees; the driver's becomes its cause."""
    if isinstance(error, QueueError):
        return error
    cause = origin(error)
    told = f"{type(cause).__name__}: {cause}".strip().removesuffix(":")
    if getattr(cause, "sqlstate", None) == _LOCK_TIMEOUT:
        return KeyLocked(
            f"another transaction holds the same unique key and has not ended ({told}):"
            " commit or roll it back, and enqueue again"
        )
    if "locked" in str(cause) and str(getattr(cause, "sqlite_errorname", "")).startswith("SQLITE_"):
        return BackendUnavailable(
            f"another connection keeps the SQLite file locked ({told}): end its write transaction;"
            " if it is your own, pass session= or connection= to enqueue inside it"
        )
    if is_transient(error):
        return BackendUnavailable(f"the database can't be reached or is busy ({told}): try again later")
    return BackendError(f"the database refused ({told})")
