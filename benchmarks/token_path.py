"""Cost of a streamed token to the router: CPU time of its process per token that a client got.

`python -m benchmarks.token_path --out results/token_path.json`

Method. Three processes: a worker that computes nothing (`token_worker.py`), the router as it is deployed (`python -m
router`, uvloop), and this one, the client, with 64 streams of one token a step. The router's CPU time (user + system,
from the kernel) is read before and after a window that begins when every stream runs, and divided by the tokens that
arrived here in between; requests begin and end outside the window. Each case is repeated and the median is reported,
with the smallest and largest value. CPU time is used because the machine is shared: wall time would measure the others.
What others do still shows a little (caches, frequency), a few per cent between repetitions and up to 20 % between days.

Cases: `paced`, a step every 5 ms, where every token arrives alone; and `full`, where the worker sends as fast as it is
read, so that tokens wait for the client's streams and are merged. Arms: `grpc alone`, a bare server that sends the same
messages to the same client, without anything before it (its own process is measured): the part of a router's cost that
is gRPC's sending; `shared`, as deployed; `http`, the same with the clients at the OpenAI door (a connection for each
stream, server-sent events with text); `direct`, where the client streams from the worker and the router sees a
checkpoint every 64 tokens.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import grpc
import psutil
import uvloop

from benchmarks.token_router import ConnectDoor, client_of, http_session_of, running_token_router, running_token_worker
from benchmarks.token_worker import TEXT
from benchmarks.trust import HOST, PLAIN
from common.trust.authority import Authority
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc

NUM_STREAMS = 64
ITL_MS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One repetition."""

    router_us_per_token: float
    kernel_us_per_token: float
    """Part of it that was spent in system calls."""
    tokens_per_s: float
    tokens_per_message: float
    """Tokens per message, as the client got them."""
    router_cores: float
    """CPU time of the router per wall time."""


class Streams:
    """The client: reads all streams of a gRPC door and counts."""

    def __init__(self, address: str, connect: ConnectDoor, *, direct: bool) -> None:
        self._address = address
        self._connect = connect
        self._is_direct = direct
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.num_tokens = 0
        self.num_messages = 0
        self.num_running = 0

    async def start(self) -> None:
        """Open all streams; returns when each has brought a token."""
        self._tasks = [asyncio.create_task(self._read(i)) for i in range(NUM_STREAMS)]
        async with asyncio.timeout(30):
            while self.num_running < NUM_STREAMS:  # noqa: ASYNC110 - a benchmark may poll
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Cancel all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for channel in self._channels.values():
            await channel.close()

    async def _read(self, seed: int) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(self._address))
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[seed, 1, 2, 3]), direct=self._is_direct
        )
        request.sampling.max_tokens = 1_000_000
        counting = self._count()
        next(counting)
        async for message in stub.Generate(request):
            if message.HasField("tokens"):
                counting.send(len(message.tokens.tokens))
            elif message.HasField("direct"):
                await self._read_direct(message.direct, counting)

    async def _read_direct(self, grant: inference_pb2.DirectGrant, counting: Generator[None, int, None]) -> None:
        stub = decode_pb2_grpc.DirectServiceStub(self._channel(grant.address, grant.server_name))
        request = decode_pb2.StreamTokensRequest(capability=grant.capability)
        async for message in stub.StreamTokens(request):
            counting.send(len(message.tokens.tokens))

    def _channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        key = (address, server_name)
        if key not in self._channels:
            self._channels[key] = self._connect(address, server_name)
        return self._channels[key]

    def _count(self) -> Generator[None, int, None]:
        """Count the messages of one stream; each is sent its number of tokens."""
        num_tokens = yield
        self.num_running += 1
        while True:
            self.num_tokens += num_tokens
            self.num_messages += 1
            num_tokens = yield


class HttpStreams(Streams):
    """The same at the OpenAI door."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__(url, _no_channel, direct=False)
        self._session = session

    async def _read(self, seed: int) -> None:
        body = {"prompt": [seed, 1, 2, 3], "max_tokens": 1_000_000, "stream": True}
        counting = self._count()
        next(counting)
        async with self._session.post(self._address, json=body) as response:
            rest = b""
            async for received in response.content.iter_any():
                *events, rest = (rest + received).split(b"\n\n")
                if num_tokens := sum(event.count(TEXT.encode()) for event in events):
                    counting.send(num_tokens)


async def measure(router_pid: int, streams: Streams, seconds: float) -> Window:
    """Measure one window."""
    loop, process = asyncio.get_running_loop(), psutil.Process(router_pid)
    cpu, tokens, messages, started_s = process.cpu_times(), streams.num_tokens, streams.num_messages, loop.time()
    await asyncio.sleep(seconds)
    after, elapsed_s = process.cpu_times(), loop.time() - started_s
    user_s, system_s = after.user - cpu.user, after.system - cpu.system
    cpu_s = user_s + system_s
    tokens, messages = streams.num_tokens - tokens, streams.num_messages - messages
    return Window(
        router_us_per_token=cpu_s / tokens * 1e6,
        kernel_us_per_token=system_s / tokens * 1e6,
        tokens_per_s=tokens / elapsed_s,
        tokens_per_message=tokens / messages,
        router_cores=cpu_s / elapsed_s,
    )


async def run_floor(*, itl_ms: float, repeats: int, seconds: float) -> list[Window]:
    """Let the client read the same messages straight from a bare gRPC server: what no router can do without."""
    authority = Authority.new(PLAIN)
    async with running_token_worker(authority, itl_ms=itl_ms) as (worker, door):
        streams = Streams(door, client_of(authority), direct=False)
        return await _windows(streams, worker.pid, repeats=repeats, seconds=seconds)


async def run_case(*, arm: str, itl_ms: float, repeats: int, seconds: float) -> list[Window]:
    """Run one arm of one case in fresh processes."""
    authority = Authority.new(PLAIN)
    async with running_token_router(authority, itl_ms=itl_ms) as router:
        if arm != "http":
            streams = Streams(router.address, client_of(authority), direct=arm == "direct")
            return await _windows(streams, router.router_pid, repeats=repeats, seconds=seconds)
        async with http_session_of(authority) as session:
            http_streams = HttpStreams(session, f"http://{HOST}:{router.http_port}/v1/completions")
            return await _windows(http_streams, router.router_pid, repeats=repeats, seconds=seconds)


async def _windows(streams: Streams, pid: int, *, repeats: int, seconds: float) -> list[Window]:
    await streams.start()
    await asyncio.sleep(0.5)
    windows = [await measure(pid, streams, seconds) for _ in range(repeats)]
    await streams.stop()
    return windows


def _no_channel(address: str, server_name: str = "") -> grpc.aio.Channel:
    raise AssertionError(f"{address} is no gRPC door")


def summary(windows: Sequence[Window]) -> str:
    """Return one line."""
    costs = [window.router_us_per_token for window in windows]
    rate = statistics.median(window.tokens_per_s for window in windows)
    merged = statistics.median(window.tokens_per_message for window in windows)
    kernel = statistics.median(window.kernel_us_per_token for window in windows)
    cores = statistics.median(window.router_cores for window in windows)
    return (
        f"{statistics.median(costs):6.1f} µs/token ({min(costs):.1f} to {max(costs):.1f}, kernel {kernel:.1f})"
        f"  {rate:8.0f} tokens/s  {merged:5.1f} tokens/message  {cores:.2f} cores"
    )


async def run(args: argparse.Namespace) -> dict[str, list[Window]]:
    """Run the cases that were asked for."""
    results: dict[str, list[Window]] = {}
    for case, itl_ms in (("paced", ITL_MS), ("full", 0.0)):
        for arm in ("grpc alone", "shared", "http", "direct"):
            name = f"{case}/{arm}"
            if args.only and args.only not in name:
                continue
            if arm == "grpc alone":
                windows = await run_floor(itl_ms=itl_ms, repeats=args.repeats, seconds=args.seconds)
            else:
                windows = await run_case(arm=arm, itl_ms=itl_ms, repeats=args.repeats, seconds=args.seconds)
            results[name] = windows
            print(f"{name:20}{summary(results[name])}", flush=True)
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="What a streamed token costs the router.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    results = uvloop.run(run(args))
    if args.out is not None:
        raw = {name: [asdict(window) for window in windows] for name, windows in results.items()}
        args.out.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
