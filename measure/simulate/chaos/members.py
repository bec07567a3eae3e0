"""Membership of the workers, as a controller sends it to routers: drains, and moves to the other pool."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from common.errors import KvrelayError
from common.ids import WorkerId
from kvrelay.v1 import worker_pb2
from measure.simulate.chaos.host import Host
from measure.simulate.chaos.routers import ChaosRouters

_GRACE_S = 10.0
"""Time in which the requests of a worker that changes its pool should have moved."""
_SETTLE_S = 5.0
"""Time in which its calls and handoffs must have ended then."""
_LOOK_S = 0.05
_OTHER_ROLE = {
    worker_pb2.WORKER_ROLE_PREFILL: worker_pb2.WORKER_ROLE_DECODE,
    worker_pb2.WORKER_ROLE_DECODE: worker_pb2.WORKER_ROLE_PREFILL,
}


class Members:
    """The members of all routers. Event loop only."""

    def __init__(self, hosts: Sequence[Host], routers: ChaosRouters) -> None:
        self._hosts = hosts
        self._routers = routers
        self._draining: set[WorkerId] = set()
        self._away: set[WorkerId] = set()

    def is_leaving(self, host: Host) -> bool:
        """Return whether routers send nothing new to a host's worker."""
        return host.endpoint.worker_id in self._draining | self._away

    async def drain(self, host: Host, seconds: float) -> None:
        """Tell a worker to leave, and keep it after all."""
        worker_id = host.endpoint.worker_id
        self._draining.add(worker_id)
        self.notify_routers()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._draining.discard(worker_id)
            self.notify_routers()

    def may_flip(self, host: Host) -> bool:
        """Return whether a worker is not the last one of its pool."""
        return sum(other.endpoint.role == host.endpoint.role for other in self._hosts) > 1

    async def flip(self, host: Host) -> None:
        """Move a worker to the other pool with its cache, as `cluster/changes/flipping.py` does.

        One that is not empty in time, or fails in between, continues in its pool.
        """
        worker, worker_id, role = host.worker, host.endpoint.worker_id, _OTHER_ROLE[host.endpoint.role]
        epoch, loop = worker.runtime.epoch, asyncio.get_running_loop()
        ends_s = loop.time() + _GRACE_S
        self._draining.add(worker_id)
        self.notify_routers()
        try:
            while self._num_users(worker_id) and loop.time() < ends_s:  # noqa: ASYNC110 - the controller looks, too
                await asyncio.sleep(_LOOK_S)
            self._draining.discard(worker_id)
            self._away.add(worker_id)
            self.notify_routers()
            with suppress(KvrelayError):
                await worker.runtime.change_role(role, epoch=epoch, grace_s=_SETTLE_S)
                if worker is host.worker:
                    host.endpoint = replace(host.endpoint, role=role)
        finally:
            self._draining.discard(worker_id)
            self._away.discard(worker_id)
            self.notify_routers()

    def _num_users(self, worker_id: WorkerId) -> int:
        return sum(router.fleet.members_by_id[worker_id].num_users for router in self._routers.alive.values())

    def notify_routers(self) -> None:
        """Send all routers the members, and those that leave."""
        present = [host.endpoint for host in self._hosts if host.endpoint.worker_id not in self._away]
        for router in self._routers.alive.values():
            router.fleet.set_workers(present, draining=self._draining)
