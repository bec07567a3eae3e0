"""CPU time of the router's process per token that a client got, with 64 streams of one token a step."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

from benchmarks.figures import Figures, spread
from benchmarks.router.children import ENCRYPTED, HOST, PLAIN
from benchmarks.router.processes import client_of, direct_door_of, http_session_of, running_router, running_workers
from benchmarks.router.streams import HttpStreams, Streams, Window, watch
from common.ports import free_port
from common.trust.authority import Authority

CASES = {"paced": 5.0, "full": 0.0}
"""Time of a step by case, in milliseconds."""
ARMS = ("grpc alone", "shared", "http", "direct")
CLUSTERS = {"": PLAIN, ", TLS": ENCRYPTED}
"""Clusters by the ending of the name of their cases."""
_PART = "tokens"


def chosen(only: str, *, tls: bool) -> list[tuple[str, str, str]]:
    """Return (case, arm, ending) of all that are measured in a round: names, as paced/http, contain `only`."""
    endings = list(CLUSTERS) if tls else [""]
    return [(case, arm, each) for case in CASES for arm in ARMS if only in f"{case}/{arm}" for each in endings]


async def measure_tokens(figures: Figures, case: str, arm: str, ending: str, *, seconds: float) -> None:
    """One round of one arm, in fresh processes."""
    authority = Authority.new(CLUSTERS[ending])
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(running_workers(authority, 1, itl_ms=CASES[case]))
        if arm == "grpc alone":
            door = await direct_door_of(authority, workers.endpoints[0].address)
            pids, streams = [workers.pid], Streams(door, client_of(authority), direct=False)
        else:
            section = {"http_port": free_port(HOST), "max_queued": 1024}
            router = await stack.enter_async_context(running_router(authority, workers.endpoints, section))
            pids = [router.pid, workers.pid]
            streams = Streams(router.ready.address, client_of(authority), direct=arm == "direct")
            if arm == "http":
                session = await stack.enter_async_context(http_session_of(authority))
                scheme = "https" if authority.settings.is_encrypted else "http"
                streams = HttpStreams(session, f"{scheme}://{HOST}:{section['http_port']}")
        await streams.start()
        await asyncio.sleep(0.5)
        figures.add(_PART, case + ending, arm, **_figures_of(await watch(streams, pids, seconds)))
        await streams.stop()


def _figures_of(window: Window) -> dict[str, float]:
    cpu, *of_worker = window.cpu
    found = {
        "us_per_token": cpu.total_s / window.num_tokens * 1e6,
        "kernel_us_per_token": cpu.system_s / window.num_tokens * 1e6,
        "tokens_per_s": window.num_tokens / window.elapsed_s,
        "tokens_per_message": window.num_tokens / window.num_messages,
        "cores": cpu.total_s / window.elapsed_s,
    }
    for worker in of_worker:
        found["worker_us_per_token"] = worker.total_s / window.num_tokens * 1e6
    return found


def tls_ratios(figures: Figures) -> Iterator[str]:
    """Yield a line for each cost with TLS, in proportion to that without it in the same round."""
    for figure in figures.all.values():
        plain = figures.all.get((figure.part, figure.case.removesuffix(", TLS"), figure.arm, figure.unit))
        if plain is not None and plain is not figure and figure.unit.endswith("us per token"):
            ratios = [on / off for on, off in zip(figure.rounds, plain.rounds, strict=True) if off]
            if ratios:  # the kernel counts CPU time in ticks: a short round may have none
                yield f"{figure.case}/{figure.arm}, {figure.unit}: {spread(ratios, percentiles=(25, 75))} times without"
