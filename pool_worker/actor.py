"""A worker as a Ray actor."""

import ray

from common.service_actor import RunningService, ServiceActor, ServiceParams


class WorkerActor(ServiceActor):
    """Runs `start_pool_worker`. Restarted by Ray, it begins in the role that it was made with."""

    async def start_service(self, params: ServiceParams) -> RunningService:
        """Start the worker; imports torch."""
        from common.wire_names import ROLE_NUMBERS
        from pool_worker.server import start_pool_worker

        host = params.host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return await start_pool_worker(
            params.config, role=ROLE_NUMBERS[params.role], worker_id=params.name, host=host, port=params.port
        )
