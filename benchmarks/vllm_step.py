"""One arm of `benchmarks.vllm_steps`: steps over vLLM's model runner in a process of its own, as JSON.

python -m benchmarks.vllm_step kvrelay-eager|kvrelay|vllm-eager|vllm BATCH
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common.model_files import DEFAULT_MODEL_ID, resolve_model

ARMS = ("kvrelay-eager", "kvrelay", "vllm-eager", "vllm")
PROMPT_TOKENS = 128
MAX_MODEL_LEN = 2048
MAX_RUNNING = 64
MAX_STEP_TOKENS = 512
WARM_STEPS, STEPS = 20, 80
_FIRST_TOKEN, _NUM_WORDS = 100, 40_000
_KV_BYTES = 1 << 30

Step = Callable[[], object]


class _Compute:
    """Counts the time inside the model and its output head."""

    def __init__(self, model: Any) -> None:
        self.spent_s = 0.0
        self._begun_s = 0.0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        compute_logits = model.compute_logits

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            try:
                return compute_logits(*args, **kwargs)
            finally:
                self._end()

        model.compute_logits = timed

    def _begin(self, *_hook: object) -> None:
        self._begun_s = time.perf_counter()

    def _end(self, *_hook: object) -> None:
        self.spent_s += time.perf_counter() - self._begun_s


def _prompts(batch: int) -> list[list[int]]:
    return [[_FIRST_TOKEN + (997 * i + 31 * j) % _NUM_WORDS for j in range(PROMPT_TOKENS)] for i in range(batch)]


def _kvrelay(batch: int, *, is_eager: bool) -> tuple[Step, Any]:
    """Return a step of our engine over vLLM's runner, with all sequences decoding, and the model."""
    from common.block_hash import hash_blocks, hash_root
    from common.clock import SystemClock
    from common.errors import Refused
    from common.ids import RequestId
    from common.sampling import SamplingParams
    from common.tokens import as_tokens
    from engine.core import EngineCore
    from engine.loading import load_executor
    from engine.options import EngineOptions
    from engine.request import EngineRequest
    from engine.scheduler import SchedulerLimits

    executor: Any = load_executor(
        EngineOptions(
            model_dir=resolve_model(DEFAULT_MODEL_ID, local_files_only=True),
            model_name="default",
            dtype="bfloat16",
            device="cpu",
            block_size=32,
            kv_memory_bytes=_KV_BYTES,
            max_model_len=MAX_MODEL_LEN,
            max_step_tokens=MAX_STEP_TOKENS,
            max_running=MAX_RUNNING,
            kernels="auto" if is_eager else "compile",
            runner="vllm",
        )
    )
    limits = SchedulerLimits(block_size=32, max_step_tokens=MAX_STEP_TOKENS, max_running=MAX_RUNNING, max_waiting=64)
    core = EngineCore(executor, limits, SystemClock())
    root = hash_root(model_fingerprint="benchmark")
    for i, prompt in enumerate(_prompts(batch)):
        request = EngineRequest(
            request_id=RequestId(f"req-{i}"),
            prompt_token_ids=as_tokens(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS, ignore_eos=True),
            hash_root=root,
            block_hashes=hash_blocks(prompt, root=root, block_size=32),
        )
        if isinstance(added := core.add(request, lambda _event: None), Refused):
            raise RuntimeError(added.reason)
    return core.step, executor._ranks.driver_worker.worker.model_runner.model  # noqa: SLF001 - to time it


def _vllm(batch: int, *, is_eager: bool) -> tuple[Step, Any]:
    """Return a step of vLLM's own engine, in this process, and the model."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(resolve_model(DEFAULT_MODEL_ID, local_files_only=True)),
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            enforce_eager=is_eager,
            disable_log_stats=True,
        )
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS, ignore_eos=True, detokenize=False
    )
    for i, prompt in enumerate(_prompts(batch)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    inside: Any = engine
    return engine.step, inside.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def main() -> None:
    """Measure an arm and print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("batch", type=int)
    args = parser.parse_args()
    start = _kvrelay if args.arm.startswith("kvrelay") else _vllm
    step, model = start(args.batch, is_eager=args.arm.endswith("-eager"))
    compute = _Compute(model)
    for _ in range(WARM_STEPS + args.batch * PROMPT_TOKENS // MAX_STEP_TOKENS):
        step()
    totals_s: list[float] = []
    computes_s: list[float] = []
    cpus_s: list[float] = []
    for _ in range(STEPS):
        before_s, cpu_before_s, begun_s = compute.spent_s, time.process_time(), time.perf_counter()
        step()
        totals_s.append(time.perf_counter() - begun_s)
        cpus_s.append(time.process_time() - cpu_before_s)
        computes_s.append(compute.spent_s - before_s)
    hosts_s = [total - spent for total, spent in zip(totals_s, computes_s, strict=True)]
    parts = {"step": totals_s, "model": computes_s, "host": hosts_s, "cpu": cpus_s}
    json.dump({f"{name}_us": 1e6 * statistics.median(values) for name, values in parts.items()}, sys.stdout)


if __name__ == "__main__":
    main()
