"""Cost of a streamed token to the router: CPU time of its process per token that a client got.

`python -m benchmarks.token_path [--json FILE]`

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
checkpoint every 64 tokens.
"""

import asyncio
from contextlib import AsyncExitStack

import uvloop

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from benchmarks.token_router import client_of, http_session_of, running_token_router, running_token_worker
from benchmarks.token_streams import ITL_MS, HttpStreams, Streams, Window, watch
from benchmarks.trust import PLAIN
from common.trust.authority import Authority

CASES = {"paced": ITL_MS, "full": 0.0}
"""Time of a step by case, in milliseconds."""
ARMS = ("grpc alone", "shared", "http", "direct")


async def run_arm(arm: str, *, itl_ms: float, repeats: int, seconds: float) -> list[dict[str, float]]:
    """Run one arm in fresh processes; returns what each window showed.

    `grpc alone` lets the client read the same messages straight from a bare gRPC server: what no router can do without.
    """
    authority = Authority.new(PLAIN)
    async with AsyncExitStack() as stack:
        if arm == "grpc alone":
            worker, door = await stack.enter_async_context(running_token_worker(authority, itl_ms=itl_ms))
            pid, streams = worker.pid, Streams(door, client_of(authority), direct=False)
        else:
            router = await stack.enter_async_context(running_token_router(authority, itl_ms=itl_ms))
            pid, streams = router.router_pid, Streams(router.address, client_of(authority), direct=arm == "direct")
            if arm == "http":
                session = await stack.enter_async_context(http_session_of(authority))
                streams = HttpStreams(session, router.http_url)
        await streams.start()
        await asyncio.sleep(0.5)
        windows = [_figures_of(await watch(streams, [pid], seconds)) for _ in range(repeats)]
        await streams.stop()
    return windows


def _figures_of(window: Window) -> dict[str, float]:
    (cpu,) = window.cpu
    return {
        "us_per_token": cpu.total_s / window.num_tokens * 1e6,
        "kernel_us_per_token": cpu.system_s / window.num_tokens * 1e6,
        "tokens_per_s": window.num_tokens / window.elapsed_s,
        "tokens_per_message": window.num_tokens / window.num_messages,
        "cores": cpu.total_s / window.elapsed_s,
    }


def main() -> None:
    """Measure and report."""
    parser = command_line("token_path", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="windows of each arm (default 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window (default 3)")
    parser.add_argument("--only", default="", help="cases and arms whose name, as paced/http, contains this")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    for case, itl_ms in CASES.items():
        for arm in ARMS:
            if args.only in f"{case}/{arm}":
                run = run_arm(arm, itl_ms=itl_ms, repeats=args.repeats, seconds=args.seconds)
                for found in uvloop.run(run):
                    figures.add("router", case, arm, **found)
                console.print(f"{case}/{arm} is done")
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/token_path.py")


if __name__ == "__main__":
    main()
