"""What a worker reports of itself, in its status and its metrics."""

from kvrelay.v1 import worker_pb2
from tests.worker.cluster import running_pool
from worker.service import WorkerService


async def test_status_and_metrics_tell_how_many_ranks_a_worker_has() -> None:
    async with running_pool({"decode-0": {}}) as pool:
        worker = pool.workers["decode-0"]
        runtime = worker.runtime
        pools = runtime.config.pools
        cut = pools.model_copy(update={"decode": pools.decode.model_copy(update={"tensor_parallel": 3})})
        for config, num_ranks in ((runtime.config, 1), (runtime.config.model_copy(update={"pools": cut}), 3)):
            runtime.config = config  # the fake engine itself has no ranks
            request = worker_pb2.GetWorkerStatusRequest()
            answer = await WorkerService(runtime).GetWorkerStatus(request, None)  # type: ignore[arg-type]
            assert answer.status.num_ranks == num_ranks
            labels = {"worker": "decode-0", "role": "decode"}
            assert worker.registry.get_sample_value("kvrelay_ranks", labels) == num_ranks
