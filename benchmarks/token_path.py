"""Cost of a streamed token to the router: CPU time of its process per token that a client got.

    python -m benchmarks.token_path [--json FILE]
    python -m benchmarks.token_path --tls --only paced --rounds 7 --repeats 1        what TLS adds

Method. Three processes: a worker that computes nothing (`token_worker.py`), the router as it is deployed (`python -m
router`, uvloop), and this one, the client, with 64 streams of one token a step. The router's CPU time (user + system,
from the kernel) is read before and after a window that begins when every stream runs, and divided by the tokens that
arrived here in between; requests begin and end outside the window. Each case is repeated and the median is reported,
with the range. CPU time is used because the machine is shared: wall time would measure the others. The work of others
still shows a little (caches, frequency), a few per cent between repetitions and up to 20 % between days.

Cases: `paced`, a step every 5 ms, where every token arrives alone; and `full`, where the worker sends as fast as it is
read, so that tokens wait for the client's streams and are merged. Arms: `grpc alone`, a bare server that sends the same
messages to the same client, without anything before it (its own process is measured): the part of a router's cost that
is gRPC's sending; `shared`, as deployed; `http`, the same with the clients at the OpenAI door (a connection for each
stream, server-sent events with text); `direct`, where the client streams from the worker and the router sees a
checkpoint every 64 tokens. The worker's CPU time per token stands beside the router's.

With `--tls` each arm is also run in a cluster with `tls.mode: on` (mutual TLS inside, TLS at the doors), in turns with
the same arm in a cluster of one host without TLS, whose processes show each other signed proofs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import uvloop

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn, spread
from benchmarks.token_router import client_of, http_session_of, running_token_router, running_token_worker
from benchmarks.token_streams import ITL_MS, HttpStreams, Streams, Window, watch
from benchmarks.trust import ENCRYPTED, PLAIN
from common.trust.authority import Authority, AuthoritySettings

CASES = {"paced": ITL_MS, "full": 0.0}
"""Time of a step by case, in milliseconds."""
ARMS = ("grpc alone", "shared", "http", "direct")
_WITH_TLS = ", TLS"
"""Ending of the name of a case with TLS."""


async def run_arm(
    arm: str, settings: AuthoritySettings, *, itl_ms: float, repeats: int, seconds: float
) -> list[dict[str, float]]:
    """Run one arm in fresh processes; returns what each window showed.

    `grpc alone` lets the client read the same messages straight from a bare gRPC server: what no router can do without.
    """
    authority = Authority.new(settings)
    async with AsyncExitStack() as stack:
        if arm == "grpc alone":
            worker, door = await stack.enter_async_context(running_token_worker(authority, itl_ms=itl_ms))
            pids, streams = [worker.pid], Streams(door, client_of(authority), direct=False)
        else:
            router = await stack.enter_async_context(running_token_router(authority, itl_ms=itl_ms))
            pids = [router.router_pid, router.worker_pid]
            streams = Streams(router.address, client_of(authority), direct=arm == "direct")
            if arm == "http":
                session = await stack.enter_async_context(http_session_of(authority))
                streams = HttpStreams(session, router.http_url)
        await streams.start()
        await asyncio.sleep(0.5)
        windows = [_figures_of(await watch(streams, pids, seconds)) for _ in range(repeats)]
        await streams.stop()
    return windows


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
        plain = figures.all.get((figure.part, figure.case.removesuffix(_WITH_TLS), figure.arm, figure.unit))
        if plain is not None and plain is not figure and figure.unit.endswith("us per token"):
            ratios = [on / off for on, off in zip(figure.rounds, plain.rounds, strict=True) if off]
            yield f"{figure.case}/{figure.arm}, {figure.unit}: {spread(ratios, percentiles=(25, 75))} times without"


def main() -> None:
    """Measure and report."""
    parser = command_line("token_path", __doc__, rounds=1)
    parser.add_argument("--repeats", type=int, default=5, help="windows of each arm in a round (default 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window (default 3)")
    parser.add_argument("--only", default="", help="cases and arms whose name, as paced/http, contains this")
    parser.add_argument("--tls", action="store_true", help="each arm with TLS, too")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    clusters = [("", PLAIN), (_WITH_TLS, ENCRYPTED)] if args.tls else [("", PLAIN)]
    chosen = [(case, arm) for case in CASES for arm in ARMS if args.only in f"{case}/{arm}"]
    for number in range(args.rounds):
        for case, arm in chosen:
            for ending, settings in in_turn(clusters, number):
                run = run_arm(arm, settings, itl_ms=CASES[case], repeats=args.repeats, seconds=args.seconds)
                for found in uvloop.run(run):
                    figures.add("router", case + ending, arm, **found)
                console.print(f"{case}{ending}/{arm} is done")
    figures.show(console)
    for line in tls_ratios(figures):
        console.print(line)
    write_figures(args.json, figures, method="benchmarks/token_path.py")


if __name__ == "__main__":
    main()
