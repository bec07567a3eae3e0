"""Streams with texts that are known beforehand, beside what a test does to a cluster of fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvrelay.client import AsyncClient, Generation, Token
from tests.builders import expected_tokens, make_request

NUM_STREAMS = 4


async def answer(
    client: AsyncClient, number: int, *, num_tokens: int, begun: asyncio.Event | None = None
) -> Generation:
    """Return the answer of a stream, which has to have the fake engine's text; its first token sets `begun`."""
    prompt = f"stream {number} " * 20
    async with client.stream(prompt, max_tokens=num_tokens, ignore_eos=True, seed=number) as stream:
        async for event in stream:
            if begun is not None and isinstance(event, Token):
                begun.set()
        done = await stream.result()
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number, "temperature": 1.0}
    expected = bytes(expected_tokens(make_request(prompt.encode(), **options))).decode()
    assert done.text == expected, (number, done)
    return done


@asynccontextmanager
async def running_streams(*clients: AsyncClient, num_tokens: int) -> AsyncIterator[list["asyncio.Task[Generation]"]]:
    """Run streams, in turn through each client, beside the block: it begins when all have begun, and ends with them."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(answer(clients[number % len(clients)], number, num_tokens=num_tokens, begun=event))
            for number, event in enumerate(begun)
        ]
        for event in begun:
            await event.wait()
        yield running


@asynccontextmanager
async def repeated_streams(client: AsyncClient, *, num_tokens: int) -> AsyncIterator[None]:
    """Run streams again and again beside the block, which begins when all have ended once."""
    over, answered = asyncio.Event(), asyncio.Event()

    async def repeat() -> None:
        while not over.is_set():
            await asyncio.gather(*(answer(client, number, num_tokens=num_tokens) for number in range(NUM_STREAMS)))
            answered.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(repeat())
        await answered.wait()
        try:
            yield
        finally:
            over.set()
