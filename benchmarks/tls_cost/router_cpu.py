"""CPU time of the router's process, per token and per request."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp

from benchmarks.answers import closed_loop
from benchmarks.figures import Figures
from benchmarks.router.arms import RequestArm, kvrelay_arm
from benchmarks.router.clients import Load
from benchmarks.tls_cost.arms import OFF, ON, SETTINGS, cpu_s, running_arms, turns
from benchmarks.token_router import TokenRouter, client_of, http_session_of
from benchmarks.token_streams import ITL_MS, HttpStreams, Streams, watch
from common.trust.authority import Authority

_SETTLE_S = 0.4
_CONNECTIONS = 32
_PROMPT_TOKENS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How many streams are watched, and for how long."""

    num_streams: int
    window_s: float


async def measure_tokens(figures: Figures, watched: Watch, *, num_rounds: int) -> None:
    """Streams at the gRPC door, at the HTTP door, and from the worker itself."""
    async with AsyncExitStack() as stack:
        arms = await running_arms(stack, itl_ms=ITL_MS)
        for case in ("gRPC", "HTTP", "direct"):
            for number, arm in turns(num_rounds):
                measured = await _stream(case, *arms[arm], watched)
                if number:
                    figures.add("tokens", f"{watched.num_streams} streams, {case}", arm, **measured)


async def measure_http_requests(figures: Figures, *, num_rounds: int, num_requests: int) -> None:
    """A closed loop of requests of one token at the HTTP door, connections kept."""
    async with AsyncExitStack() as stack:
        arms = await running_arms(stack, itl_ms=0.0)
        for number, arm in turns(num_rounds):
            authority, router = arms[arm]
            async with http_session_of(authority) as session:
                url = f"{router.http_url}/v1/completions"
                await _ask(session, url, num_requests=2 * _CONNECTIONS)  # connects
                before_s = cpu_s(router.router_pid)
                await _ask(session, url, num_requests=num_requests)
                used_s = cpu_s(router.router_pid) - before_s
            if number:
                figures.add("requests", "HTTP", arm, router_CPU_us_per_request=used_s / num_requests * 1e6)


async def measure_grpc_requests(figures: Figures, *, num_rounds: int, num_requests: int) -> None:
    """A closed loop of requests of one token at the gRPC door, with prefill and decode mocks behind it."""
    async with AsyncExitStack() as stack:
        arms = {arm: await stack.enter_async_context(kvrelay_arm(SETTINGS[arm])) for arm in (OFF, ON)}
        for number, arm in turns(num_rounds):
            rng = random.Random(number)
            prompts = [rng.choices(range(40_000), k=_PROMPT_TOKENS) for _ in range(num_requests)]
            used_s = await _run(arms[arm], Load(prompts=prompts, num_chunks=1, num_connections=_CONNECTIONS))
            if number:
                figures.add("requests", "gRPC", arm, router_CPU_us_per_request=used_s / num_requests * 1e6)


async def _run(arm: RequestArm, load: Load) -> float:
    """Return the CPU time of the router that a load takes."""
    before_s: list[float] = []
    await arm.run(load, begin=lambda: before_s.append(cpu_s(arm.router_pid)))
    return cpu_s(arm.router_pid) - before_s[0]


async def _stream(case: str, authority: Authority, router: TokenRouter, watched: Watch) -> dict[str, float]:
    async with http_session_of(authority) as session:
        streams = (
            HttpStreams(session, router.http_url, num_streams=watched.num_streams)
            if case == "HTTP"
            else Streams(router.address, client_of(authority), direct=case == "direct", num_streams=watched.num_streams)
        )
        await streams.start()
        await asyncio.sleep(_SETTLE_S)
        window = await watch(streams, (router.router_pid, router.worker_pid), watched.window_s)
        await streams.stop()
    router_us, worker_us = (cpu.total_s / window.num_tokens * 1e6 for cpu in window.cpu)
    return {
        "router_CPU_us_per_token": router_us,
        "worker_CPU_us_per_token": worker_us,
        "tokens_per_message": window.num_tokens / window.num_messages,
    }


async def _ask(session: aiohttp.ClientSession, url: str, *, num_requests: int) -> None:
    async def ask(number: int) -> None:
        async with session.post(url, json={"prompt": [number % 250, 1, 2, 3], "max_tokens": 1}) as response:
            response.raise_for_status()
            await response.read()

    await closed_loop(ask, range(num_requests), concurrency=_CONNECTIONS)
