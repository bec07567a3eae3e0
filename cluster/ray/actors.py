"""The actors of a cluster as Ray shows them: a class for each pool, a readable name, and metrics at Ray's agent."""

import asyncio
import logging

import ray
from ray.exceptions import RayError

from cluster.ray.ray_metrics import RayMetrics, has_agent
from cluster.worker_process.actor import WorkerActor
from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from router.actor import RouterActor

logger = logging.getLogger(__name__)


class RayActor(ServiceActor):
    """What Ray needs of a service: its address, its name, its metrics."""

    def __init__(self, params: ServiceParams) -> None:
        super().__init__(params)
        self._tags = {"cluster": params.config.name, "process": params.name, "pool": params.role}
        self._metrics: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Return the name by which Ray's dashboard shows this actor and its calls."""
        return f"{self._tags['cluster']}/{self._tags['process']} ({self._tags['pool']} on {self.node_address()})"

    def node_address(self) -> str:
        """Return the address by which other hosts reach this one."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def on_serving(self, service: RunningService) -> None:
        """Repeat the service's metrics at Ray's agent, if there is one."""
        self._metrics = asyncio.get_running_loop().create_task(self._repeat(service))

    async def _repeat(self, service: RunningService) -> None:
        try:
            is_heard = await asyncio.to_thread(has_agent)
        except (RayError, RuntimeError, OSError) as error:  # Ray's head does not answer
            logger.warning("Ray is not told the metrics", extra={"reason": str(error)})
            return
        if is_heard:
            await RayMetrics(service.registry, self._tags).update_forever()
        else:
            logger.info("Ray is not told the metrics", extra={"reason": "its agent needs ray[default]"})

    async def stop(self, grace_s: float) -> None:
        """See `ServiceActor.stop`."""
        if self._metrics is not None:
            self._metrics.cancel()
        await super().stop(grace_s)


class Router(RayActor, RouterActor):
    """A router in Ray."""


class PrefillWorker(RayActor, WorkerActor):
    """A worker in Ray that was started for the prefill pool."""


class DecodeWorker(RayActor, WorkerActor):
    """A worker in Ray that was started for the decode pool."""
