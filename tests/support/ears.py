"""Hears what a queue tells other processes, with nothing of the queue's own: a LISTEN by psycopg, or bare sockets.

What was sent before a test asks what was heard is in the answer: a mark is sent after it, and all is read up to that.
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from typing import NamedTuple

import msgspec
import psycopg

from queue_core.backend import Backend
from queue_core.ids import time_ordered_uuid
from tests.support.databases import Database, PostgresDatabase
from tests.support.store import knowing, new_worker

_CHANNEL = "queue_core"
_MARK = "up to here"
_read = msgspec.json.Decoder(tuple[str, str, str]).decode


class Ears(ABC):
    """Other processes, all in one."""

    @abstractmethod
    def heard(self) -> Sequence[str]:
        """The queues that were told of since the last time; one several times if it was told so."""

    async def next_heard(self) -> Sequence[str]:
        """The same, once there is something."""
        async with asyncio.timeout(30):
            while not (queues := await asyncio.to_thread(self.heard)):
                pass
        return queues


@asynccontextmanager
async def listening_to(database: Database, backend: Backend, *queues: str) -> AsyncGenerator[Ears]:
    """Ears for what is told of these queues. `backend` is for what has to be in the database; it tells nothing."""
    if isinstance(database, PostgresDatabase):
        with listening_on(database) as ears:
            yield ears
        return
    with ExitStack() as stack:
        sockets = {queue: stack.enter_context(_bound_socket()) for queue in queues}
        for queue, ear in sockets.items():
            # A beat writes the row of a worker as it is given; to register one would give it an address of its own.
            await backend.beat(new_worker(queues=[queue], wakeup_address=_address(ear)), knowing([], []))
        yield _SqliteEars(sockets)


# Postgres


class Hint(NamedTuple):
    """What one NOTIFY says, and the number of the server's process that sent it."""

    place: str
    sender: str
    queue: str
    pid: int


class PostgresEars(Ears):
    """A connection that listens. It hears of every queue of every schema; `hints` is what it heard last."""

    def __init__(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        self._connection = connection
        self.hints: Sequence[Hint] = []
        self._notifications: list[psycopg.Notify] = []
        connection.add_notify_handler(self._notifications.append)
        connection.execute(f"LISTEN {_CHANNEL}")

    def heard(self) -> Sequence[str]:
        self.hints = self._hear()
        return [hint.queue for hint in self.hints]

    def _hear(self) -> Sequence[Hint]:
        self.say(_MARK)
        # A notification is only noticed while the connection does something.
        while all(each.payload != _MARK for each in self._notifications):
            self._connection.execute("SELECT 1")
        found = [Hint(*_read(each.payload), each.pid) for each in self._notifications if each.payload != _MARK]
        self._notifications.clear()
        return found

    def say(self, payload: str) -> None:
        """Notify others on the same channel."""
        self._connection.execute("SELECT pg_notify(%s, %s)", [_CHANNEL, payload])


@contextmanager
def listening_on(database: PostgresDatabase) -> Generator[PostgresEars]:
    with closing(database.connect()) as connection:
        connection.autocommit = True
        yield PostgresEars(connection)


# SQLite


class _SqliteEars(Ears):
    """The sockets of workers that exist in the table only, one of each queue."""

    def __init__(self, sockets: "dict[str, socket.socket]") -> None:
        self._sockets = sockets

    def heard(self) -> Sequence[str]:
        return [queue for queue, ear in self._sockets.items() for _ in range(_rings(ear))]


def _rings(ear: socket.socket) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # Full after ten, on some systems: a test that lets it come to that has to listen more often.
        sender.setblocking(False)
        sender.sendto(_MARK.encode(), ear.getsockname())
    count = 0
    while ear.recv(16) != _MARK.encode():
        count += 1
    return count


def _bound_socket() -> socket.socket:
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind(f"\0test-{time_ordered_uuid()}")
    return ear


def _address(ear: socket.socket) -> str:
    name: bytes = ear.getsockname()
    return f"@{name[1:].decode()}"
