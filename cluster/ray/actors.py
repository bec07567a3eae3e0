"""The actors of a cluster as Ray shows them: a class for each pool, a readable name, and metrics at Ray's agent."""

import asyncio
import logging

import ray
from ray.exceptions import RayError

from cluster.ray.ray_metrics import RayMetrics, has_agent
from common.model_files import resolve_model
from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from common.trust.credentials import Credentials
from common.wire_names import ROLE_NUMBERS

logger = logging.getLogger(__name__)


class RayActor(ServiceActor):
    """A service with what Ray needs: its address, its name, its metrics."""

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
            logger.warning("cannot report metrics to Ray", extra={"reason": str(error)})
            return
        if is_heard:
            await RayMetrics(service.registry, self._tags).update_forever()
        else:
            logger.info("cannot report metrics to Ray", extra={"reason": "its agent needs ray[default]"})

    async def stop(self, grace_s: float) -> None:
        """See `ServiceActor.stop`."""
        if self._metrics is not None:
            self._metrics.cancel()
        await super().stop(grace_s)


class Router(RayActor):
    """A router in Ray."""

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the router. Raises ModelNotFound when the tokenizer's files are not on this host."""
        from router.server import start_router

        model = params.config.model
        model_dir = None
        if model.engine != "fake":
            model_dir = await asyncio.to_thread(resolve_model, model.id, local_files_only=model.local_files_only)
        return await start_router(params.config, credentials, model_dir=model_dir, host=host, port=params.port)


class _Worker(RayActor):
    """A worker in Ray. A restarted actor begins in the role that it was created with."""

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the worker; imports torch."""
        from cluster.worker_process.server import start_pool_worker

        role = ROLE_NUMBERS[params.role]
        return await start_pool_worker(params.config, credentials, role=role, host=host, port=params.port)


class PrefillWorker(_Worker):
    """A worker in Ray that was started for the prefill pool."""


class DecodeWorker(_Worker):
    """A worker in Ray that was started for the decode pool."""
