"""Latencies that clients of whole clusters see."""

import random
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop
from rich.console import Console

from benchmarks.answers import closed_loop, read
from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.figures import Figures, quantile
from benchmarks.tls_cost.arms import OFF, ON, turns
from cluster.lifecycle import ClusterInfo
from kvrelay.client import AsyncClient

_SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine and its load."""

    name: str
    model: dict[str, Any]
    concurrency: int
    num_requests: int
    """Requests of a round."""
    num_output_tokens: int
    num_prompt_tokens: int = 200


FAKE = Case(
    name="fake engine, 5 ms a step",
    model={"engine": "fake", "fake_step_ms": 5.0},
    concurrency=4,
    num_requests=24,
    num_output_tokens=24,
)
SMOLLM2 = Case(name="SmolLM2-135M", model={}, concurrency=1, num_requests=2, num_output_tokens=4)


@dataclass(slots=True)
class _Seen:
    """One round, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def measure_latency(figures: Figures, case: Case, *, num_rounds: int, console: Console) -> None:
    """Start both clusters, ask them in short turns, stop them. p99 is that of all rounds together."""
    with ExitStack() as stack:
        infos = {arm: _start(stack, case, arm, console) for arm in (OFF, ON)}
        uvloop.run(_measure(figures, case, infos, num_rounds))


def _start(stack: ExitStack, case: Case, arm: str, console: Console) -> ClusterInfo:
    info, _config = stack.enter_context(
        running_doors(
            launcher="local",
            console=console,
            model=case.model,
            pools=ONE_THREAD_EACH,
            router={"local_prefill_max_tokens": 0},
            tls={"mode": arm},
            transfer={"transports": ["grpc"]},
        )
    )
    return info


async def _measure(figures: Figures, case: Case, infos: dict[str, ClusterInfo], num_rounds: int) -> None:
    everything = {arm: _Seen() for arm in infos}
    async with AsyncExitStack() as stack:
        clients = {
            arm: await stack.enter_async_context(AsyncClient(info.address, timeout_s=300, tls=info.tls))
            for arm, info in infos.items()
        }
        for number, arm in turns(num_rounds):
            seen = await _round(clients[arm], case, random.Random(f"{_SEED}/{number}"))
            if number:
                ttft_ms, gap_ms = (quantile(values, 0.5) * 1e3 for values in (seen.ttft_s, seen.gaps_s))
                figures.add("latency", case.name, arm, TTFT_p50_ms=ttft_ms, gap_p50_ms=gap_ms)
                everything[arm].ttft_s += seen.ttft_s
                everything[arm].gaps_s += seen.gaps_s
    for arm, seen in everything.items():
        ttft_ms, gap_ms = (quantile(values, 0.99) * 1e3 for values in (seen.ttft_s, seen.gaps_s))
        figures.add("latency", case.name, arm, TTFT_p99_ms=ttft_ms, gap_p99_ms=gap_ms)


async def _round(client: AsyncClient, case: Case, rng: random.Random) -> _Seen:
    prompts = [rng.choices(range(32, 127), k=case.num_prompt_tokens) for _ in range(case.num_requests)]
    seen = _Seen()

    async def ask(prompt: list[int]) -> None:
        answer = await read(client.stream(prompt, temperature=0, max_tokens=case.num_output_tokens, ignore_eos=True))
        plan = answer.generation.plan
        assert plan.prefill_worker_id, f"prompts are to be handed over, but the plan was {plan}"
        seen.ttft_s.append(answer.ttft_s)
        seen.gaps_s += answer.gaps_s

    await closed_loop(ask, prompts, concurrency=case.concurrency)
    return seen
