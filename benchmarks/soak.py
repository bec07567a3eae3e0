"""Does memory grow? A load that fills every page of one engine, for minutes.

    python -m benchmarks.soak [--minutes 10] [--engine model|fake] [--num-blocks 400] [--limit-mib 16]

Method. One engine core with few pages gets more requests than they hold, so that sequences are preempted and cached
blocks evicted all the time: prompts of random length, two thirds of them behind one of a few shared prefixes (hits in
the prefix cache); greedy and sampled answers of random length, with penalties, log-probabilities and several samples
(copies on write); a part is cancelled at a random moment; a part is held after its prefill, its KV read as a puller
would, and dropped. Once a second resident memory (and the device's, where there is one) is sampled. The first fifth of
the time is warm-up. Growth is the Theil-Sen slope of the rest (the median of the slopes between all pairs of samples,
which outliers do not move) times its length. Exit code 1: growth above the limit, a page that was never filled, or a
page still held when every request is over.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from scipy.stats import theilslopes

from benchmarks.command import command_line, write_json
from common.block_hash import hash_blocks, hash_root
from common.clock import SystemClock
from common.config import ServingConfig, parse_config
from common.errors import Refused
from common.ids import mint_request_id
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import Failed, Tokens
from engine.executor import Executor
from engine.group import Group
from engine.request import EngineRequest
from worker.factory import limits_for, load_executor_for

MAX_MODEL_LEN = 1024
MAX_STEP_TOKENS = 512
_LIVE_REQUESTS = 48
_SHARED_PREFIXES = 6
_WARM_UP_SHARE = 0.2
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory at one moment."""

    at_s: float
    rss_bytes: int
    device_bytes: int
    """Memory that the CUDA allocator holds; 0 without a device."""
    python_blocks: int
    """Allocations of the Python interpreter: distinguishes a leak of objects from one below Python."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of the load."""

    steps: int = 0
    requests: int = 0
    refused: int = 0
    cancelled: int = 0
    held: int = 0
    tokens: int = 0
    max_filled_blocks: int = 0
    """Most pages that held KV at the same time, in use or cached."""


class Load:
    """Requests without end for one core."""

    def __init__(self, core: EngineCore, rng: random.Random) -> None:
        self.counts = Counts()
        self._core = core
        self._rng = rng
        self._root = hash_root(model_fingerprint=core.executor.kv.shape.fingerprint)
        self._prefixes = [self._tokens(rng.randint(64, 400)) for _ in range(_SHARED_PREFIXES)]
        self._live: list[Group] = []

    def step(self) -> None:
        """Top up, cancel a request now and then, and run one step. Raises the error of a request that failed."""
        while len(self._live) < _LIVE_REQUESTS and self._arrive():
            pass
        if self._rng.random() < 0.02:
            self._drop(self._rng.choice(self._live))
            self.counts.cancelled += 1
        for group, event in self._core.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Tokens):
                self.counts.tokens += len(event.tokens)
                if group.holds_after_prefill and not group.is_over:
                    self._core.executor.kv.read_blocks(group.leader.block_ids())
                    self._drop(group)
        self._live = [group for group in self._live if not group.is_over]
        pool = self._core.pool
        pool.drain_events()
        self._core.load()
        self.counts.steps += 1
        self.counts.max_filled_blocks = max(self.counts.max_filled_blocks, pool.num_used + pool.num_cached_blocks)

    def stop(self) -> None:
        """Cancel everything and let what is in flight end."""
        for group in self._live:
            self._drop(group)
        while self._core.has_work:
            self._core.step()

    def _drop(self, group: Group) -> None:
        self._core.cancel(group)
        self._core.wake()

    def _arrive(self) -> bool:
        """Put one request in line; False when the engine takes no more."""
        request = self._request()
        holds = self._rng.random() < 0.1

        def sink(_event: object) -> None:
            """Events are read off the steps."""

        group = self._core.add_prefill_only(request, sink) if holds else self._core.add(request, sink)
        if isinstance(group, Refused):
            self.counts.refused += 1
            return False
        self._core.wake()
        self._live.append(group)
        self.counts.requests += 1
        self.counts.held += holds
        return True

    def _request(self) -> EngineRequest:
        rng = self._rng
        prefix = rng.choice(self._prefixes) if rng.random() < 2 / 3 else []
        prompt = (*prefix, *self._tokens(rng.randint(1, 300)))
        block_size = self._core.executor.kv.shape.block_size
        return EngineRequest(
            request_id=mint_request_id(),
            prompt_token_ids=as_tokens(prompt),
            sampling=self._sampling(),
            hash_root=self._root,
            block_hashes=hash_blocks(prompt, root=self._root, block_size=block_size),
        )

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 40)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            seed=rng.randrange(1 << 32),
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=rng.randint(1, 96),
            ignore_eos=True,
            num_logprobs=rng.choice((None, None, 5)),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._core.executor.vocab_size) for _ in range(count)]


def growth_bytes(samples: Sequence[tuple[float, float]]) -> float:
    """Return by how much the trend of (seconds, bytes) rises behind the warm-up; 0 for fewer than two samples."""
    if not samples:
        return 0.0
    first_s, last_s = samples[0][0], samples[-1][0]
    settled = [sample for sample in samples if sample[0] >= first_s + _WARM_UP_SHARE * (last_s - first_s)]
    if len(settled) < 2:
        return 0.0
    slope, *_ = theilslopes([value for _, value in settled], [at_s for at_s, _ in settled])
    return float(slope) * (settled[-1][0] - settled[0][0])


def growth(samples: Sequence[MemorySample]) -> dict[str, float]:
    """Return by how much each kind of memory grew behind the warm-up, by the name of its field."""
    names = ("rss_bytes", "device_bytes", "python_blocks")
    return {name: growth_bytes([(each.at_s, getattr(each, name)) for each in samples]) for name in names}


def run_load(load: Load, *, duration_s: float, sample_every_s: float, has_device: bool) -> list[MemorySample]:
    """Step until the time is over; returns the memory over time."""
    process = psutil.Process()
    samples: list[MemorySample] = []
    started_s = time.monotonic()
    while (at_s := time.monotonic() - started_s) < duration_s:
        if at_s >= len(samples) * sample_every_s:
            samples.append(_sample(process, at_s, has_device=has_device))
            if len(samples) % 60 == 1:
                counts = load.counts
                print(
                    f"{at_s:5.0f} s  RSS {samples[-1].rss_bytes / _MIB:7.1f} MiB  {counts.steps} steps,"
                    f" {counts.requests} requests, {counts.tokens} tokens",
                    flush=True,
                )
        load.step()
    samples.append(_sample(process, time.monotonic() - started_s, has_device=has_device))
    return samples


def _sample(process: psutil.Process, at_s: float, *, has_device: bool) -> MemorySample:
    device_bytes = 0
    if has_device:
        import torch

        device_bytes = torch.cuda.memory_reserved()
    return MemorySample(
        at_s=at_s,
        rss_bytes=process.memory_info().rss,
        device_bytes=device_bytes,
        python_blocks=sys.getallocatedblocks(),
    )


def verdict(samples: Sequence[MemorySample], core: EngineCore, counts: Counts, *, limit_bytes: float) -> list[str]:
    """Return what is wrong, in sentences. Every request is over."""
    problems = []
    for name, grown in growth(samples).items():
        if name.endswith("bytes") and grown > limit_bytes:
            problems.append(f"{name} grew by {grown / _MIB:.1f} MiB behind the warm-up")
    if counts.max_filled_blocks < core.pool.num_blocks:
        problems.append(f"at most {counts.max_filled_blocks} of {core.pool.num_blocks} pages were filled")
    if core.pool.num_used:
        problems.append(f"{core.pool.num_used} pages are held though every request is over")
    return problems


def _config(args: argparse.Namespace) -> ServingConfig:
    pool = {"num_blocks": args.num_blocks, "max_step_tokens": MAX_STEP_TOKENS, "threads": args.threads}
    model = {"id": args.model, "device": args.device, "max_model_len": MAX_MODEL_LEN, "local_files_only": True}
    if args.engine == "fake":
        model["engine"] = "fake"
    return parse_config({"model": model, "pools": {"decode": pool}}, source="soak")


def _report(samples: Sequence[MemorySample], executor: Executor, core: EngineCore, load: Load) -> dict[str, Any]:
    """Print what the load did and how memory grew; returns it with every sample."""
    grown = growth(samples)
    state = core.load()
    print(f"{executor.model_name}, {core.pool.num_blocks} pages, {samples[-1].at_s:.0f} s: {asdict(load.counts)}")
    print(
        f"preemptions {state.num_preemptions}, prompt tokens computed {state.num_computed_tokens},"
        f" found in the cache {state.num_cached_tokens}"
    )
    print(
        f"growth behind the warm-up: RSS {grown['rss_bytes'] / _MIB:+.2f} MiB"
        f" of {samples[-1].rss_bytes / _MIB:.0f}, device {grown['device_bytes'] / _MIB:+.2f} MiB,"
        f" allocations of the interpreter {grown['python_blocks']:+.0f}"
    )
    return {
        "model": executor.model_name,
        "num_blocks": core.pool.num_blocks,
        "counts": asdict(load.counts),
        "preemptions": state.num_preemptions,
        "growth": grown,
        "samples": [asdict(sample) for sample in samples],
    }


def main() -> int:
    """Run the soak."""
    parser = command_line("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long (default 10)")
    parser.add_argument("--engine", choices=["model", "fake"], default="model", help="what computes (default: a model)")
    parser.add_argument("--model", default="default", help="checkpoint folder (default: the default model)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where (default auto)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--num-blocks", type=int, default=400, help="pages (default 400: less than the load needs)")
    parser.add_argument("--limit-mib", type=float, default=16, help="growth that is still none (default 16)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the load (default 1)")
    args = parser.parse_args()
    config = _config(args)
    executor, _tokenizer = load_executor_for(config, config.pools.decode)
    core = EngineCore(executor, limits_for(config.pools.decode), SystemClock())
    load = Load(core, random.Random(args.seed))
    has_device = executor.kv.shared_region is None and args.engine == "model"
    samples = run_load(load, duration_s=args.minutes * 60, sample_every_s=1.0, has_device=has_device)
    load.stop()
    write_json(args.json, _report(samples, executor, core, load))
    problems = verdict(samples, core, load.counts, limit_bytes=args.limit_mib * _MIB)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
