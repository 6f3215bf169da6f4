"""Takes back the jobs of workers that are provably dead, without waiting for their leases."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import anyio.to_thread

from queue_core.backend import Upkeep
from queue_core.checks import check_int
from queue_core.liveness import process_table, proof_of_death, this_process
from queue_core.model import Holder, JobId, QueueName, Reaped, StoredJob, WorkerId

_LIMIT: Final = 200
_log = logging.getLogger(__name__)


class Orphans:
    """Runs when a worker starts, and now and then while it works.

    Touches the named queues only, and in them only claims whose owner is proved dead by the rules of `liveness`: any
    number of living workers may be on the same queues. With `park`, what was running is not run again but parked.
    """

    def __init__(
        self, store: Upkeep, queues: Collection[QueueName], *, park: bool = False, limit: int = _LIMIT
    ) -> None:
        self._store = store
        self._queues = queues
        self._park = park
        self._limit = check_int(limit, "limit", 1, 10_000)

    async def run_once(self) -> Reaped:
        if not self._queues:
            return Reaped()
        proofs = await self._proofs(await self._store.holders(self._queues))
        return await self._sweep(list(proofs)) if proofs else Reaped()

    async def _proofs(self, holders: Sequence[Holder]) -> Mapping[WorkerId, str]:
        """Who is dead, and how we know."""
        if not holders:
            return {}
        # A thread only where a look takes long: it would stay behind in an application that has stopped us.
        found = await anyio.to_thread.run_sync(_look, holders) if process_table().blocks else _look(holders)
        for worker in (holder.worker for holder in holders if holder.worker.id in found):
            _log.warning(
                "worker %s (pid %d on %s) is dead and its jobs are taken back: %s",
                worker.id,
                worker.pid,
                worker.host,
                found[worker.id],
            )
        return found

    async def _sweep(self, dead: Sequence[WorkerId]) -> Reaped:
        requeued: list[JobId] = []
        parked: list[StoredJob] = []
        while True:
            taken = await self._store.sweep_orphans(self._queues, dead, park=self._park, limit=self._limit)
            requeued += taken.requeued
            parked += taken.parked
            if len(taken) < self._limit:
                return Reaped(requeued, parked)


def _look(holders: Sequence[Holder]) -> Mapping[WorkerId, str]:
    here = this_process()
    proofs = {holder.worker.id: proof_of_death(holder, here) for holder in holders}
    return {worker: proof for worker, proof in proofs.items() if proof is not None}
