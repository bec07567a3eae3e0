"""Pools of workers that were busy for a given share of a minute."""

from common.ids import WorkerId
from common.timing import StepModel, TimingModel
from kvrelay.v1 import worker_pb2
from router.diagnosis.pool import DiagnosedPool, DiagnosedWorker

TIMING = TimingModel(
    prefill=StepModel(constant_s=0.01, per_prefill_token_s=0.001),
    decode=StepModel(constant_s=0.01, per_decode_s=0.001, per_context_token_s=1e-6, num_samples=100),
    max_step_tokens=512,
)


def make_worker(
    name: str, *, busy: float = 0.5, batch: float = 1.0, slowness: float = 0.0, used: int = 100, places: int = 64
) -> DiagnosedWorker:
    """Return a worker that decoded 1,000 steps in its busy share of 60 s, half of them bound by reading weights."""
    steps = worker_pb2.StepTotals(
        window_s=60.0,
        covered_s=60.0,
        num_decode_steps=1000,
        num_decodes=round(1000 * batch),
        num_context_tokens=round(1000 * batch * 1000),
        decode_s=60.0 * busy,
        decode_memory_s=30.0 * busy,
        decode_weights_s=24.0 * busy,
        decode_compute_s=6.0 * busy,
    )
    status = worker_pb2.WorkerStatus(
        load=worker_pb2.LoadReport(num_blocks=1000, num_free_slots=places),
        num_used_blocks=used,
        num_cached_blocks=300,
        recent_steps=[steps],
    )
    return DiagnosedWorker(worker_id=WorkerId(name), status=status, timing=TIMING, block_size=16, slowness=slowness)


def make_pool(name: str, *workers: DiagnosedWorker) -> DiagnosedPool:
    return DiagnosedPool(name=name, workers=workers, window_s=60.0)
