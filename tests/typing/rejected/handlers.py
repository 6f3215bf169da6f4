"""Handlers that no worker could call, or that return something else than they say."""

from queue_core import Context, Job


class OtherResult(Job[str]):
    async def run(self, ctx: Context) -> int:  # rejected
        return 1


class UnexpectedResult(Job):
    async def run(self, ctx: Context) -> int:  # rejected
        return 1


class WithoutContext(Job):
    async def run(self) -> None: ...  # rejected


class OtherContext(Job):
    async def run(self, ctx: int) -> None: ...  # rejected


class MoreArguments(Job):
    async def run(self, ctx: Context, more: int) -> None: ...  # rejected
