"""A worker as a Ray actor."""

import ray

from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from common.trust.credentials import Credentials


class WorkerActor(ServiceActor):
    """Runs `start_pool_worker`. An actor that Ray restarts begins in the role that it was created with."""

    def node_address(self) -> str:
        """Return the address by which other hosts reach this one."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the worker; imports torch."""
        from cluster.worker_process.server import start_pool_worker
        from common.wire_names import ROLE_NUMBERS

        role = ROLE_NUMBERS[params.role]
        return await start_pool_worker(params.config, credentials, role=role, host=host, port=params.port)
