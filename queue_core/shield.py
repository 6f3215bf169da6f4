"""Writes that run to their end, whatever happens to whoever asked for them.

A task cancelled inside an aiosqlite transaction can leave the whole database locked until the garbage
collector runs, and one cancelled inside a COMMIT does not know what it did. So writes run in a task of
their own. `anyio.CancelScope(shield=True)` alone does not stop a native `task.cancel()`; the task alone
does not stop an anyio scope from cancelling again and again. It takes both.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def finish(write: Coroutine[Any, Any, T], *, name: str, among: "set[asyncio.Task[Any]] | None" = None) -> T:
    """Run a write to its end even if the caller is cancelled; the cancellation is raised after it.

    While it runs it is `among` the given ones, for whoever has to wait for them all.
    """
    task = asyncio.create_task(write, name=name)
    if among is not None:
        among.add(task)
        task.add_done_callback(among.discard)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.cancelled():
                    raise
                cancelled = error
            except BaseException:  # noqa: BLE001 the task's own; it comes out of result() below
                break
    if cancelled is not None:
        # Looked at, so that a failure nobody is left to hear of is not logged as never retrieved.
        task.exception()
        raise cancelled
    return task.result()
