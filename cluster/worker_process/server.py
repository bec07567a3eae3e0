"""Loads and starts a worker that can change its role: the services of both pools on one runtime.

Routers choose the service to call by the runtime's role.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from common.config import ServingConfig
from common.ids import WorkerId
from common.otlp import make_tracer
from common.trust.credentials import Credentials
from decode_worker.service import decode_services
from kv_transfer.link_rates import measure_link_rates
from kvrelay.v1 import worker_pb2
from prefill_worker.service import prefill_services
from worker.environment import Environment
from worker.factory import load_model_for, load_template_for
from worker.runtime import WorkerRuntime, pool_of
from worker.serving import PlaneService, RunningWorker, start_worker
from worker.worker_tiers import open_tiers


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
    """Load the model and serve under the name in the credentials. Raises OSError if the port is taken."""
    runtime = await _load(config, credentials, role=role)
    return await start_worker(runtime, pool_services, credentials, host=host, port=port)


async def _load(
    config: ServingConfig, credentials: Credentials, *, role: worker_pb2.WorkerRole.ValueType
) -> WorkerRuntime:
    """Load the model off the event loop; return a runtime that is not started.

    The thread that loads ends before the engine's begins. Each thread that has computed in parallel keeps helpers, and
    OpenMP counts those of all: with more than there are cores, every wait between helpers becomes a call of the kernel,
    hundreds for each token.
    """
    pool = pool_of(config, role)
    worker_id = credentials.identity.name
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loading:
        model, drive, tokenizer = await loop.run_in_executor(loading, load_model_for, config, pool)
        chat_template = await loop.run_in_executor(loading, load_template_for, config)
        tiers = await loop.run_in_executor(loading, open_tiers, config.tiers, model.kv.shape)
    runtime = WorkerRuntime(
        config=config,
        role=role,
        worker_id=WorkerId(worker_id),
        executor=model,
        tokenizer=tokenizer,
        environment=replace(Environment.real(credentials), drive=drive, tiers=tiers),
    )
    runtime.chat_template = chat_template
    runtime.tracer = make_tracer(config.tracing, service="kvrelay-worker", instance=worker_id)
    if model.floors is not None:  # the device was measured, too
        runtime.link_rates = await measure_link_rates(config.transfer, model.kv, engine=runtime.engine)
    return runtime
