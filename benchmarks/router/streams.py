"""Clients that read many streams of tokens and count, and what processes compute meanwhile."""

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import aiohttp
import grpc
import psutil

from benchmarks.router.processes import ConnectDoor
from benchmarks.router.workers import TEXT
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc

NUM_STREAMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """CPU time that a process spent."""

    user_s: float
    system_s: float
    """Part that was spent in system calls."""

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.user_s + self.system_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Counts and times of a period in which all streams ran."""

    elapsed_s: float
    num_tokens: int
    num_messages: int
    """Messages that brought the tokens, as the client got them."""
    cpu: tuple[CpuTime, ...]
    """One for each process that was watched."""


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
    """The same at the OpenAI door; `door_url` is its scheme, host and port."""

    def __init__(self, session: aiohttp.ClientSession, door_url: str) -> None:
        super().__init__(f"{door_url}/v1/completions", _no_channel, direct=False)
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


async def watch(streams: Streams, pids: Sequence[int], seconds: float) -> Window:
    """Wait; returns what the streams brought and what the processes computed meanwhile."""
    loop, processes = asyncio.get_running_loop(), [psutil.Process(pid) for pid in pids]
    before = [process.cpu_times() for process in processes]
    tokens, messages, started_s = streams.num_tokens, streams.num_messages, loop.time()
    await asyncio.sleep(seconds)
    after, elapsed_s = [process.cpu_times() for process in processes], loop.time() - started_s
    return Window(
        elapsed_s=elapsed_s,
        num_tokens=streams.num_tokens - tokens,
        num_messages=streams.num_messages - messages,
        cpu=tuple(
            CpuTime(user_s=last.user - first.user, system_s=last.system - first.system)
            for first, last in zip(before, after, strict=True)
        ),
    )


def _no_channel(address: str, server_name: str = "") -> grpc.aio.Channel:
    raise AssertionError(f"{address} is not a gRPC door")
