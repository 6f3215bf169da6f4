"""What a worker on SQLite leaves beside the database, for other processes of the machine to see and reach it.

A *lock file* says whether its process is there: the kernel frees the lock the moment that the process ends,
however it ends, and not while it is merely stopped; and it holds between containers, where process numbers
mean nothing. A file of its own, because closing any descriptor of the database file would drop SQLite's own
locks. A *datagram socket* is how others wake it: one byte says that there is something new.
"""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queue_core.model import WorkerId

if TYPE_CHECKING or sys.platform != "win32":
    import fcntl

_LONGEST_PATH: Final = 100
"""What a socket's address may have on every system."""


class LockFile:
    """A file that is locked as long as this process holds it open."""

    def __init__(self, database: Path, worker: WorkerId) -> None:
        self.path = database.with_name(f"{database.name}-worker-{worker}")
        self._descriptor: int | None = None

    def hold(self) -> str | None:
        """Make and lock it; returns its name, or None where the system has no such locks."""
        if sys.platform == "win32":
            return None
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return None  # a name too long: the lease decides
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A file system without such locks, or somebody else's lock, whose file must stay.
            os.close(descriptor)
            return None
        self._descriptor = descriptor
        return self.path.name

    def let_go(self) -> None:
        """Remove it, and then unlock it: a file that is there and free means a process that has died."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def is_free(database: Path, name: str) -> bool:
    """Whether nobody holds the lock file any more. A file that is not there proves nothing."""
    if sys.platform == "win32":
        return False
    try:
        descriptor = os.open(database.with_name(name), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_free(database: Path, names: Sequence[str]) -> None:
    """Remove the lock files that dead workers have left behind."""
    for name in names:
        if is_free(database, name):
            with suppress(OSError):
                database.with_name(name).unlink(missing_ok=True)


class Doorbell:
    """A socket on which others tell a worker that there is something new."""

    def __init__(self, worker: WorkerId, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring
        self._socket: socket.socket | None = None
        # Linux has names without files: nothing is left behind, and a long path does not matter.
        self._is_abstract = sys.platform == "linux"
        self._name = f"queue-core-{worker}"

    def open(self) -> str | None:
        """Start to listen; returns the address, or None where there are no such sockets."""
        if not hasattr(socket, "AF_UNIX"):
            return None
        address = f"@{self._name}" if self._is_abstract else str(Path(tempfile.gettempdir()) / f"{self._name}.sock")
        if len(address) > _LONGEST_PATH:
            return None
        try:
            bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            return None  # no descriptor left: the worker polls
        try:
            bell.setblocking(False)
            bell.bind(_wire(address))
            asyncio.get_running_loop().add_reader(bell, self._read)
        except OSError:
            bell.close()
            return None
        self._socket = bell
        return address

    def _read(self) -> None:
        if self._socket is None:
            return
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
        self._on_ring()

    def close(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        name = self._socket.getsockname()
        self._socket.close()
        self._socket = None
        if isinstance(name, str) and name:
            Path(name).unlink(missing_ok=True)


def ring(addresses: Collection[str]) -> None:
    """Wake the workers at these addresses. One that is gone, or has plenty to read, is passed over."""
    if not addresses or not hasattr(socket, "AF_UNIX"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for address in addresses:
            with suppress(OSError):
                sender.sendto(b"1", _wire(address))


def _wire(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address
