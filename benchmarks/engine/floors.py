"""The rate that an engine which wastes nothing reaches on this machine, in bfloat16.

On a shared host the machine's own rates change from minute to minute: they are measured before every case, and a case
is held against its own.
"""

from benchmarks.engine.cases import Case, Rate
from common.timing import StepShape
from engine.work import DeviceRates, ModelShape, StepFloors


def best_tokens_per_s(case: Case, model: ModelShape, rates: DeviceRates) -> float:
    """Return the rate of a case when all prompts are read at once, and no step is longer than its floor."""
    floors = StepFloors(
        model=model, weight_bytes=model.weight_bytes, kv_bytes_per_token=model.kv_bytes_per_token, rates=rates
    )
    num_requests, num_tokens = case.num_requests, case.prompt_tokens
    prompts = StepShape(
        num_prefill_tokens=num_requests * num_tokens,
        num_prefill_pairs=num_requests * (num_tokens * (num_tokens + 1) // 2),
    )
    context = num_requests * (num_tokens + case.output_tokens // 2)
    prefill_s = floors.step_s(prompts)
    decode_s = floors.step_s(StepShape(num_decodes=num_requests, num_context_tokens=context))
    if case.rate is Rate.DECODE:
        return num_requests / decode_s
    if case.rate is Rate.PREFILL:
        return num_requests * num_tokens / prefill_s
    return num_requests * case.output_tokens / (prefill_s + (case.output_tokens - 1) * decode_s)
