"""Closed-loop clients: so many connections, each with one request at a time, over one round."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from common.rpc import Connect, until_ready
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of one round."""

    prompts: Sequence[Sequence[int]]
    """Token ids; sent in order, one request each."""
    num_chunks: int
    num_connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times that the client saw."""

    wall_s: float
    first_chunk_s: tuple[float, ...]
    """Time from sending to the first token, of each request."""


Ask = Callable[[int], Awaitable[float]]
"""Sends the request of that number; returns the time of its first token, since it was sent."""


async def _drive(num_requests: int, connections: Sequence[Ask]) -> Measured:
    numbers = iter(range(num_requests))
    first_chunk_s: list[float] = []

    async def one(ask: Ask) -> None:
        for number in numbers:
            first_chunk_s.append(await ask(number))

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for ask in connections:
            group.create_task(one(ask))
    return Measured(wall_s=time.perf_counter() - started_s, first_chunk_s=tuple(first_chunk_s))


async def run_grpc(connect: Connect, address: str, load: Load) -> Measured:
    """Run a round against kvrelay."""
    sampling = sampling_pb2.SamplingParams(max_tokens=load.num_chunks, temperature=0.0)
    requests = [
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
        for prompt in load.prompts
    ]
    channels = [connect(address) for _ in range(load.num_connections)]

    def connection(channel: grpc.aio.Channel) -> Ask:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def ask(number: int) -> float:
            started_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
            async for message in stub.Generate(requests[number]):
                if message.HasField("tokens"):
                    num_tokens += len(message.tokens.tokens)
                    first_s = first_s or time.perf_counter() - started_s
            assert num_tokens == load.num_chunks, f"{num_tokens} tokens, not {load.num_chunks}"
            return first_s

        return ask

    try:
        assert all(await asyncio.gather(*(until_ready(channel, timeout_s=10) for channel in channels))), address
        return await _drive(len(requests), [connection(channel) for channel in channels])
    finally:
        for channel in channels:
            await channel.close()


async def run_http(port: int, load: Load) -> Measured:
    """Run a round against a router that speaks HTTP; a token is four characters of text."""
    bodies = [_http_request(prompt, port) for prompt in load.prompts]
    streams = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 20) for _ in range(load.num_connections)]

    def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Ask:
        async def ask(number: int) -> float:
            started_s = time.perf_counter()
            writer.write(bodies[number])
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head[:20], head
            first_s, num_events = 0.0, 0
            while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
                chunk = await reader.readexactly(size + 2)
                first_s = first_s or time.perf_counter() - started_s
                num_events += chunk.count(b"data: {")
            await reader.readexactly(2)
            assert num_events == load.num_chunks, f"{num_events} events, not {load.num_chunks}"
            return first_s

        return ask

    try:
        return await _drive(len(bodies), [connection(*stream) for stream in streams])
    finally:
        for _reader, writer in streams:
            writer.close()


def _http_request(prompt: Sequence[int], port: int) -> bytes:
    text = "".join(f"{token % 36**3:03x} "[:4] for token in prompt)
    message = {"role": "user", "content": text}
    body = json.dumps({"model": "mock", "stream": True, "messages": [message]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
