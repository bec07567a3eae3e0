"""Reads pool samples from metrics in Prometheus' text format.

It knows vLLM's metrics, one worker per engine, and those of our router, which cover only its queue.
"""

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from measure.load.records import PoolSample, WorkerSample

_QUEUED = "kvrelay_requests_queued"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE_CONFIG = "vllm:cache_config_info"
_PROMPT_TOKENS, _HIT_TOKENS = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"
_WANTED = (_QUEUED, _RUNNING, _WAITING, *_KV_USAGE, _CACHE_CONFIG, _PROMPT_TOKENS, _HIT_TOKENS)

_Values = Mapping[tuple[str, str], float]
"""(name, engine) -> value"""


def pool_sample(text: str, at_s: float) -> PoolSample | None:
    """Return the sample in a text; None when it has no known metric."""
    # the parser is slow, and there are thousands of lines
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    values, num_blocks = _read("\n".join(lines))
    engines = sorted({engine for name, engine in values if name in (_RUNNING, _WAITING)})
    queued = [value for (name, _), value in values.items() if name == _QUEUED]
    if not engines and not queued:
        return None
    return PoolSample(
        at_s=at_s,
        num_queued=int(sum(queued)),
        workers=tuple(_worker(engine, values, num_blocks.get(engine, 0)) for engine in engines),
    )


def _read(text: str) -> tuple[_Values, Mapping[str, int]]:
    """Return the values by engine, and the number of blocks of each engine."""
    values: dict[tuple[str, str], float] = {}
    num_blocks: dict[str, int] = {}
    for family in text_string_to_metric_families(text + "\n"):
        for sample in family.samples:
            engine = sample.labels.get("engine", "0")
            if sample.name == _CACHE_CONFIG:
                count = sample.labels.get("num_gpu_blocks", "")
                num_blocks[engine] = int(count) if count.isdecimal() else 0
            else:
                values[sample.name, engine] = sample.value
    return values, num_blocks


def _worker(engine: str, values: _Values, num_blocks: int) -> WorkerSample:
    num_cached_tokens = int(values.get((_HIT_TOKENS, engine), 0))
    return WorkerSample(
        worker_id=f"engine-{engine}",
        role="engine",
        num_running=int(values.get((_RUNNING, engine), 0)),
        num_waiting=int(values.get((_WAITING, engine), 0)),
        num_blocks=num_blocks,
        num_used_blocks=round(num_blocks * _first(values.get((name, engine)) for name in _KV_USAGE)),
        num_computed_tokens=max(0, int(values.get((_PROMPT_TOKENS, engine), 0)) - num_cached_tokens),
        num_cached_tokens=num_cached_tokens,
    )


def _first(values: Iterable[float | None]) -> float:
    return next((value for value in values if value is not None), 0.0)
