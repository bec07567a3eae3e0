"""The decode worker as a Ray actor."""

import ray

from common.service_actor import RunningService, ServiceActor, ServiceParams


class DecodeActor(ServiceActor):
    """Runs `start_decode_worker`."""

    async def start_service(self, params: ServiceParams) -> RunningService:
        """Start the worker; imports torch."""
        from decode_worker.server import start_decode_worker

        host = params.host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return await start_decode_worker(params.config, worker_id=params.name, host=host, port=params.port)
