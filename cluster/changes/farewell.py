"""Saves what is hot in the caches of workers that go without having been asked by us.

SIGTERM tells a worker to go (a host that is taken away, an operator): it says so to the routers, which move its
answers, and these tell us with their next reply. What it has cached is moved as when a pool shrinks (evacuation.py).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from cluster.changes.evacuation import Evacuation, Peer
from cluster.processes.routers import Routers
from common.config import PoolConfig, PoolsConfig

logger = logging.getLogger(__name__)


class Farewells:
    """Evacuates each worker that leaves by itself, once. Event loop only."""

    def __init__(
        self,
        routers: Routers,
        evacuation: Evacuation,
        *,
        pools: PoolsConfig,
        serving: Callable[[], Sequence[Peer]],
        staying: Callable[[str], Sequence[Peer]],
    ) -> None:
        """`staying`: those of `serving` that can take in what the worker of a name leaves."""
        self._routers = routers
        self._evacuation = evacuation
        self._pools = pools
        self._serving = serving
        self._staying = staying

    async def run(self) -> NoReturn:
        """Evacuate until cancelled."""
        known: frozenset[str] = frozenset()
        async with asyncio.TaskGroup() as group:
            while True:
                leaving = await self._routers.until_leaving_changes(known)
                for peer in self._serving():
                    if peer.worker_id in leaving - known:
                        group.create_task(self._save(peer), name=f"evacuate {peer.worker_id}")
                known = leaving
        raise AssertionError("it ends only when it is cancelled")

    async def _save(self, peer: Peer) -> None:
        pool: PoolConfig = getattr(self._pools, peer.role)
        try:
            await self._evacuation.evacuate(peer, self._staying(peer.worker_id), grace_s=pool.drain_grace_s)
        except Exception:  # a kindness must not end the cluster
            logger.exception("evacuation failed", extra={"worker_id": peer.worker_id})
