"""Starts a worker that can change its role: the services of both pools on one runtime.

Routers choose the service to call by the runtime's role.
"""

from common.config import ServingConfig
from common.trust.credentials import Credentials
from decode_worker.service import decode_services
from kvrelay.v1 import worker_pb2
from prefill_worker.service import prefill_services
from worker.runtime import WorkerRuntime
from worker.serving import PlaneService, RunningWorker, start_worker
from worker.watchdog import watch_over


def pool_services(runtime: WorkerRuntime) -> list[PlaneService]:
    """Return the services of both pools on a runtime."""
    return [*prefill_services(runtime), *decode_services(runtime)]


async def start_pool_worker(
    config: ServingConfig,
    credentials: Credentials,
    *,
    role: worker_pb2.WorkerRole.ValueType,
    host: str,
    port: int,
) -> RunningWorker:
    """Load the model and serve under the name in the credentials; from then on a watchdog may end this process.

    Raises OSError if the port is taken.
    """
    worker_id = credentials.identity.name
    runtime = await WorkerRuntime.load_from(config, role=role, worker_id=worker_id, credentials=credentials)
    worker = await start_worker(runtime, pool_services, credentials, host=host, port=port)
    watch_over(runtime)
    return worker
