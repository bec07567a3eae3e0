"""One call at a time to a process that is idle: on a connection that is there, and each on a new one."""

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import grpc

from benchmarks.figures import Figures, quantile
from benchmarks.tls_cost.arms import cpu_s, running_arms, turns
from benchmarks.token_router import TokenRouter, client_of, controller, http_session_of
from common.rpc import Connect
from common.trust.authority import Authority
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

Ask = Callable[[], Awaitable[None]]
Call = Callable[[grpc.aio.Channel], Awaitable[object]]


async def measure_connections(figures: Figures, *, num_rounds: int, num_calls: int) -> None:
    """Measure connections to a worker's control, as the controller, and to the router's doors, as a client."""
    async with AsyncExitStack() as stack:
        arms = await running_arms(stack, itl_ms=5.0)
        for number, arm in turns(num_rounds):
            await _measure(figures if number else Figures(), arm, *arms[arm], num_calls)


async def _measure(figures: Figures, arm: str, authority: Authority, router: TokenRouter, num_calls: int) -> None:
    async def at(case: str, pid: int, connect: Connect, address: str, call: Call) -> None:
        async with connect(address) as channel:
            us, _ = await _each(lambda: _void(call(channel)), pid, num_calls)
            figures.add("parts", f"call, {case}", arm, us=us)

        async def on_new_channel() -> None:
            async with connect(address) as channel:
                await call(channel)

        us, server_us = await _each(on_new_channel, pid, num_calls)
        figures.add("parts", f"new connection and call, {case}", arm, us=us, server_CPU_us=server_us)

    await at(
        "worker's control", router.worker_pid, controller(authority).worker, router.worker_address, _get_worker_status
    )
    await at("gRPC door", router.router_pid, client_of(authority), router.address, _list_models)

    async def on_new_session() -> None:
        async with http_session_of(authority) as session, session.get(f"{router.http_url}/live") as response:
            response.raise_for_status()

    us, server_us = await _each(on_new_session, router.router_pid, num_calls)
    figures.add("parts", "new connection and request, HTTP door", arm, us=us, server_CPU_us=server_us)


async def _each(ask: Ask, server_pid: int, num_calls: int) -> tuple[float, float]:
    """Return the median wall time of a call, and the server's mean CPU time; microseconds."""
    await ask()
    samples, before_s = [], cpu_s(server_pid)
    for _ in range(num_calls):
        started_s = time.perf_counter()
        await ask()
        samples.append((time.perf_counter() - started_s) * 1e6)
    return quantile(samples, 0.5), (cpu_s(server_pid) - before_s) / num_calls * 1e6


async def _void(call: Awaitable[object]) -> None:
    await call


def _get_worker_status(channel: grpc.aio.Channel) -> Awaitable[object]:
    return worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerStatus(worker_pb2.GetWorkerStatusRequest())


def _list_models(channel: grpc.aio.Channel) -> Awaitable[object]:
    return inference_pb2_grpc.InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest())
