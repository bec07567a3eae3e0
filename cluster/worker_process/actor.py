"""A worker as an actor."""

from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from common.trust.credentials import Credentials


class WorkerActor(ServiceActor):
    """Runs `start_pool_worker`. A restarted actor begins in the role that it was created with."""

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the worker; imports torch."""
        from cluster.worker_process.server import start_pool_worker
        from common.wire_names import ROLE_NUMBERS

        role = ROLE_NUMBERS[params.role]
        return await start_pool_worker(params.config, credentials, role=role, host=host, port=params.port)
