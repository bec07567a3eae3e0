"""The servers that are put side by side, and what was measured of them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.figures import Figures
from benchmarks.peers.vllm_server import VllmServer
from measure.experiment.arms import ArmPlan
from measure.experiment.points import Arm, Point
from measure.experiment.prepare import Experiment, Workloads
from measure.experiment.real import RealBench
from measure.experiment.runner import Measure
from measure.experiment.store import Store
from measure.figures import ALL

KV_MEMORY_GIB = 1
"""KV memory of an arm, in total."""
MAX_STEP_TOKENS = 512
MAX_MODEL_LEN = 8192
NUM_THREADS = 2
"""CPU threads of an arm, in total."""


def _pool(share: float) -> dict[str, Any]:
    """Return a pool of one worker with a share of an arm's threads and memory."""
    return {
        "count": 1,
        "threads": int(share * NUM_THREADS),
        "kv_memory_gib": share * KV_MEMORY_GIB,
        "max_step_tokens": MAX_STEP_TOKENS,
    }


_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "1p1d": {"prefill": _pool(0.5), "decode": _pool(0.5)},
    "aggregated": {"prefill": {"count": 0}, "decode": _pool(1)},
}
KVRELAY_MODELS = {
    "kvrelay": {"engine": "torch"},
    "kvrelay-vllm": {"engine": "vllm", "kernels": "compile"},
    "kvrelay-vllm-eager": {"engine": "vllm"},
}
"""`model` of the arms whose names begin so."""
KVRELAY_POOLS = {f"{name}-{shape}": pools for name in KVRELAY_MODELS for shape, pools in _SHAPES.items()}
VLLM_STEP_TOKENS: dict[str, int | None] = {
    "vllm-cpu": MAX_STEP_TOKENS,
    "vllm-cpu-default-step": None,  # its own choice, 2048: fewer, longer steps
}
VLLM_PD = "vllm-cpu-1p1d"
"""vLLM's own disaggregation, with the threads of kvrelay's 1p1d and twice its memory for KV."""
ARMS = (*KVRELAY_POOLS, *VLLM_STEP_TOKENS, VLLM_PD)


def plan_of(arm: str) -> ArmPlan:
    """Return how an experiment names an arm. To it every arm is served elsewhere, at an address of OpenAI's API."""
    pools = KVRELAY_POOLS.get(arm, _SHAPES["1p1d" if arm == VLLM_PD else "aggregated"])
    num_prefill, num_decode = (pools[role]["count"] for role in ("prefill", "decode"))
    threads = str(NUM_THREADS // (num_prefill + num_decode))
    described = Arm(name=arm, num_prefill=num_prefill, num_decode=num_decode, settings={"threads": threads})
    return ArmPlan(arm=replace(described, is_external=True), serving=None)


class HttpBench(RealBench):
    """Serves the arms and measures them through OpenAI's API. Main thread only."""

    def __init__(
        self,
        experiment: Experiment[Workloads],
        store: Store,
        peers: Mapping[str, VllmServer],
        starting: Mapping[str, Callable[[], AbstractContextManager[str]]],
        console: Console,
    ) -> None:
        """`peers` are up; `starting` start others, and yield the URL of their API."""
        spec, workloads = experiment.spec, experiment.workloads
        super().__init__(spec, experiment.path, workloads=workloads, store=store, report=console.print)
        self._peers = peers
        self._starting = starting
        self._console = console

    @contextmanager
    def serve(self, plan: ArmPlan) -> Iterator[Measure]:
        """See `RealBench`; reports the CPU time that servers of other arms used meanwhile."""
        arm = plan.arm.name
        with self._serving(arm) as url, super().serve(replace(plan, url=url)) as measure:
            before_s, started_s = self._idle_cpu_s(arm), time.monotonic()
            yield measure
            share = (self._idle_cpu_s(arm) - before_s) / (time.monotonic() - started_s)
            self._console.print(f"{arm}: idle peers used {share:.1%} of a core")

    @contextmanager
    def _serving(self, arm: str) -> Iterator[str]:
        """Yield the URL of an arm's API."""
        if arm in self._peers:
            yield self._peers[arm].url
            return
        if arm in self._starting:
            with self._starting[arm]() as url:
                yield url
            return
        model = {"max_model_len": MAX_MODEL_LEN} | KVRELAY_MODELS[arm.rpartition("-")[0]]
        pools = KVRELAY_POOLS[arm]
        with running_doors(launcher="local", console=self._console, model=model, pools=pools) as (info, _config):
            yield f"http://{info.http_address}/v1"

    def _idle_cpu_s(self, arm: str) -> float:
        """Return the CPU time so far of servers that are not this arm's."""
        return sum(server.cpu_s() for name, server in self._peers.items() if name != arm)


def figures_of(points: Iterable[Point]) -> Figures:
    """Return a value of each repeat for every load, kind of request and arm."""
    figures = Figures()
    for point in points:
        case = f"{point.load:g} requests/s"
        for kind, found in point.kinds.items():
            figures.add(
                case,
                kind,
                point.arm.name,
                requests=found.num_requests,
                not_complete=found.num_not_complete,
                good_share=found.good_share,
                goodput_per_s=found.num_good / point.duration_s,
            )
            for name in ("ttft", "itl", "tpot", "e2e"):
                if (times := getattr(found, name)) is not None:
                    values_ms = {f"{name.upper()}_{share}_ms": 1000 * s for share, s in asdict(times).items()}
                    figures.add(f"{case}: {name.upper()}", kind, point.arm.name, **values_ms)
        hit = {} if point.token_hit is None else {"cached_share": point.token_hit}
        rate = point.output_tokens_per_s
        figures.add(case, ALL, point.arm.name, output_tokens_per_s=rate, **hit)
    return figures
