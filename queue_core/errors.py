"""Every error that queue-core raises, as one tree.

QueueError
├── ConfigurationError(ValueError)     a value that can't work; names the field
│   └── UnsupportedDatabase            an engine that can't carry a queue; names one that can
├── NotInitialized                     the default queue was used before Queue.init, or a queue before it was opened
├── AlreadyInitialized                 a second Queue.init without a close
├── SchemaError                        tables missing, older or newer than this version
├── PayloadError(TypeError)            a payload that is not what its class declares, or not JSON
├── UnknownJobType(LookupError)        a job class that was never registered
├── WrongThread                        a synchronous call where it would wait for itself
├── WrongDatabase                      a session or connection that belongs to another database
└── BackendError                       the database refused; see __cause__
    ├── JobRefused                     a rule of the database refused this very job
    ├── TransactionOpen                the caller's own open transaction is in the way
    └── BackendUnavailable             and may accept later; loops wait and go on
        └── KeyLocked                  somebody's open transaction holds the same key
"""


class QueueError(Exception):
    """The base of all errors that queue-core raises."""


class ConfigurationError(QueueError, ValueError):
    """A value that can't work; the message names the field and what it takes."""


class UnsupportedDatabase(ConfigurationError):
    """An engine that can't carry a queue; the message gives the URL of one that can."""


class NotInitialized(QueueError):
    """The queue is not open yet, or was closed."""


class AlreadyInitialized(QueueError):
    """There is a default queue already."""


class SchemaError(QueueError):
    """The tables are missing, older than this version needs, or newer than it understands."""


class PayloadError(QueueError, TypeError):
    """A payload that does not fit its job class, or can't be written as JSON and read back."""


class UnknownJobType(QueueError, LookupError):
    """A job class or name that this queue does not know."""


class WrongThread(QueueError):
    """A synchronous call on a thread where it would wait for itself for ever."""


class WrongDatabase(QueueError):
    """A session or connection that belongs to another database than the queue."""


class BackendError(QueueError):
    """The database refused; the driver's own error is the `__cause__`."""


class JobRefused(BackendError):
    """A rule that was added to the table (a constraint, a trigger) refused this very job."""


class TransactionOpen(BackendError):
    """The caller's own open transaction holds the lock that this call would wait for."""


class BackendUnavailable(BackendError):
    """The database can't be reached or is busy now, and may accept the same call later."""


class KeyLocked(BackendUnavailable):
    """Another transaction that has not ended holds the same unique key."""
