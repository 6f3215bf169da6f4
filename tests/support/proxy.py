"""A proxy that loses the answer to a commit: the transaction is done, and its client can't know.

It follows the wire protocol between a client and Postgres just far enough to see commits. The server answers
each of the client's batches (a simple Query, or extended messages up to their Sync) and ends the answer with
ReadyForQuery. The proxy holds the answer back until then. By its command tags and the transaction's state the
server has now told whether the batch committed: nothing is guessed from the SQL, and nothing depends on time.
If it did, and the policy says so, the answer is dropped and the client's connection aborted.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104


class CommitCuttingProxy:
    """Listens on `port` of 127.0.0.1.

    `should_cut` is asked about every commit: with 'COMMIT', or with the SQL that was autocommitted (a batch
    of several: one per line). While it is asked, `committing` has all SQL of the transaction. `cuts` has the
    texts that it agreed to; while `armed` is false it is not asked.
    """

    def __init__(self, host: str, port: int, should_cut: Callable[[str], bool]) -> None:
        self.port: int = 0
        self.armed: bool = True
        self.cuts: list[str] = []
        self.committing: Sequence[str] = ()
        self._upstream: tuple[str, int] = (host, port)
        self._should_cut: Callable[[str], bool] = should_cut
        self._server: asyncio.Server | None = None
        self._connections: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        ends = await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # a closed transport needs one more turn of the loop to be gone
        for end in ends:
            # A policy that raised has to fail the test, and not only a connection.
            if isinstance(end, Exception) and (error is None or isinstance(error, Exception)):
                raise end

    def cuts_off(self, text: str, transaction: Sequence[str]) -> bool:
        """Ask the policy about a commit that has just been done, and note its cut."""
        self.committing = tuple(transaction)
        if not self.armed or not self._should_cut(text):
            return False
        self.cuts.append(text)
        return True

    def _accept(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        connection = _Connection(self, from_client, to_client).run(*self._upstream)
        self._connections.append(asyncio.create_task(connection, name="proxy: connection"))


class _Connection:
    """One client, and the connection to the server that was opened for it."""

    def __init__(
        self, proxy: CommitCuttingProxy, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        self._proxy: CommitCuttingProxy = proxy
        self._from_client: asyncio.StreamReader = from_client
        self._to_client: asyncio.StreamWriter = to_client
        self._batches: deque[list[str]] = deque()  # the SQL of each batch that is not answered yet

    async def run(self, host: str, port: int) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(host, port)
            try:
                # The end of either input raises, and so ends both.
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump_requests(to_server), name="proxy: requests")
                    pumps.create_task(self._pump_answers(from_server), name="proxy: answers")
            finally:
                to_server.close()
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side left, or the server is down: to the client, a connection that closes
        finally:
            self._to_client.close()

    async def _pump_requests(self, to_server: asyncio.StreamWriter) -> None:
        to_server.write(await self._read_startup())
        self._batches.append([])  # logging in ends with a ReadyForQuery too
        statements: dict[bytes, str] = {}  # SQL by the name that Parse gave it
        portals: dict[bytes, str] = {}  # SQL by the name that Bind gave it
        executed: list[str] = []
        while True:
            kind, message = await _read_message(self._from_client)
            names = message[5:].split(b"\0", 2)
            if kind == b"P":
                statements[names[0]] = names[1].decode()
            elif kind == b"B":
                portals[names[0]] = statements.get(names[1], "")
            elif kind == b"E":
                executed.append(portals.get(names[0], ""))
            elif kind == b"Q":
                executed.append(names[0].decode())
            if kind in (b"Q", b"S", b"F"):  # Query, Sync, FunctionCall
                self._batches.append(executed)
                executed = []
            to_server.write(message)
            await to_server.drain()

    async def _read_startup(self) -> bytes:
        while True:
            # The only messages that have no type byte.
            head = await self._from_client.readexactly(8)
            if int.from_bytes(head[4:], "big") not in (_SSL_REQUEST, _GSS_REQUEST):
                return head + await self._from_client.readexactly(int.from_bytes(head[:4], "big") - 8)
            self._to_client.write(b"N")

    async def _pump_answers(self, from_server: asyncio.StreamReader) -> None:
        logged_in = False
        transaction: list[str] = []
        tags: set[bytes] = set()
        held = bytearray()
        try:
            while True:
                kind, message = await _read_message(from_server)
                held += message
                if kind == b"C":
                    tags.add(message[5:-1])
                elif kind == b"s":
                    tags.add(b"")  # the row limit of asyncpg's fetchrow was reached: no tag follows
                elif kind == b"E":
                    tags.add(b"ROLLBACK")
                elif kind == b"Z":
                    batch = self._batches.popleft()
                    transaction += batch
                    text = _committed(batch, tags, state=message[5:])
                    if text and self._proxy.cuts_off(text, transaction):
                        held.clear()
                        self._to_client.transport.abort()
                        return
                    if text or message[5:] == b"I":
                        transaction = []
                    tags = set()
                    logged_in = True
                # To log in and to start a COPY, the client has to see the answer before it goes on; and what
                # comes between batches (a notification, the answer to a Flush) says nothing of a commit.
                if kind in (b"Z", b"G", b"W") or not logged_in or not self._batches:
                    self._to_client.write(bytes(held))
                    held.clear()
                    await self._to_client.drain()
        finally:
            # A server that goes away says why, but sends no ReadyForQuery after it.
            self._to_client.write(bytes(held))


def _committed(batch: Sequence[str], tags: set[bytes], state: bytes) -> str:
    """The text to ask the policy about, or nothing if the batch committed nothing."""
    # By the server's tag: a COMMIT in a failed transaction is a ROLLBACK.
    if b"COMMIT" in tags:
        return "COMMIT"
    if tags and b"ROLLBACK" not in tags and state == b"I":
        return "\n".join(dict.fromkeys(batch))
    return ""


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """A message's type, and the whole of it: type byte, length (which counts itself), body."""
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
