"""A request's path through the router's own process: closed-loop clients before it, mock workers behind it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc

from benchmarks.figures import Figures, quantile
from benchmarks.peers.group import cpu_s
from benchmarks.router.children import PLAIN
from benchmarks.router.processes import client_of, running_router, running_workers
from common.rpc import until_ready
from common.trust.authority import Authority
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

_NUM_WORKERS = 4
_NUM_CONNECTIONS = 32


async def measure_requests(
    figures: Figures, rng: random.Random, *, num_tokens: int, num_chunks: int, num_requests: int, num_rounds: int
) -> None:
    """Run all rounds of one size, after one that warms up."""
    authority = Authority.new(PLAIN)
    async with (
        running_workers(authority, _NUM_WORKERS, itl_ms=0.0) as mocks,
        running_router(authority, mocks.endpoints, {"max_message_mib": 16}) as router,
    ):
        connect, pids = partial(client_of(authority), router.ready.address), (router.pid, mocks.pid)
        for number in range(num_rounds + 1):
            prompts = [rng.choices(range(40_000), k=num_tokens) for _ in range(num_requests)]
            before_s = [cpu_s(pid) for pid in pids]
            wall_s, first_chunk_s = await _run(connect, prompts, num_chunks)
            router_s, mock_s = (cpu_s(pid) - since for pid, since in zip(pids, before_s, strict=True))
            if number:
                figures.add(
                    "requests",
                    f"{num_tokens} tokens, {num_chunks} chunks",
                    "kvrelay",
                    requests_per_s=num_requests / wall_s,
                    router_CPU_us_per_request=router_s / num_requests * 1e6,
                    mock_CPU_us_per_request=mock_s / num_requests * 1e6,
                    first_chunk_ms_p50=quantile(first_chunk_s, 0.5) * 1e3,
                    first_chunk_ms_p99=quantile(first_chunk_s, 0.99) * 1e3,
                )


async def _run(
    connect: Callable[[], grpc.aio.Channel], prompts: Sequence[Sequence[int]], num_chunks: int
) -> tuple[float, list[float]]:
    """Send one request after the other on each connection; returns the time of all, and to each one's first token."""
    sampling = sampling_pb2.SamplingParams(max_tokens=num_chunks, temperature=0.0)
    requests = iter(
        [
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
            for prompt in prompts
        ]
    )
    first_chunk_s: list[float] = []

    async def use(channel: grpc.aio.Channel) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for request in requests:
            started_s, first_s, num_received = time.perf_counter(), 0.0, 0
            async for message in stub.Generate(request):
                if message.HasField("tokens"):
                    num_received += len(message.tokens.tokens)
                    first_s = first_s or time.perf_counter() - started_s
            assert num_received == num_chunks, f"{num_received} tokens, not {num_chunks}"
            first_chunk_s.append(first_s)

    channels = [connect() for _ in range(_NUM_CONNECTIONS)]
    try:
        assert all(await asyncio.gather(*(until_ready(each, timeout_s=10) for each in channels))), "no connection"
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for channel in channels:
                group.create_task(use(channel))
        return time.perf_counter() - begun_s, first_chunk_s
    finally:
        for channel in channels:
            await channel.close()
