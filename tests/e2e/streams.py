"""Streams with texts that are known beforehand, beside what a test does to a cluster of fake engines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from common.structured_outputs import structure_text
from kvrelay.client import AsyncClient, Generation, Token
from tests.builders import expected_tokens, make_request

NUM_STREAMS = 4


def asked(number: int, *, num_tokens: int, num_phrases: int = 3) -> tuple[str, dict[str, Any]]:
    """Return the prompt of a stream and its options, for an answer of so many tokens; every other one is structured."""
    prompt = f"stream {number}: " + "what one worker has computed another one takes over; " * num_phrases
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": num_tokens}
    options: dict[str, Any] = {"structured_outputs": {"json": numbers}} if number % 2 else {"ignore_eos": True}
    return prompt, options | {"max_tokens": num_tokens, "seed": number, "temperature": 1.0}


async def answer(
    client: AsyncClient, number: int, *, on_begin: Callable[[], None] = lambda: None, **length: int
) -> Generation:
    """Return the answer of a stream, which has to have the fake engine's text; its first token calls `on_begin`."""
    prompt, options = asked(number, **length)
    num_tokens = 0
    async with client.stream(prompt, timeout_s=120, **options) as stream:
        async for event in stream:
            num_tokens += isinstance(event, Token)
            if num_tokens == 1:
                on_begin()
        done = await stream.result()
    if "structured_outputs" in options:
        options["structured_outputs"] = structure_text(options["structured_outputs"])
    assert done.text == bytes(expected_tokens(make_request(prompt.encode(), **options))).decode(), (number, done)
    return done


async def answers(client: AsyncClient, *, num_tokens: int, num_streams: int = NUM_STREAMS) -> list[Generation]:
    """Return the answers of streams side by side."""
    return await asyncio.gather(*(answer(client, number, num_tokens=num_tokens) for number in range(num_streams)))


@asynccontextmanager
async def running_streams(
    *clients: AsyncClient, num_tokens: int, num_streams: int = NUM_STREAMS, num_begun: int = NUM_STREAMS
) -> AsyncIterator[Sequence["asyncio.Task[Generation]"]]:
    """Run streams, in turn through each client, beside the block: it begins when so many have begun, ends with all."""
    begun = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                answer(clients[number % len(clients)], number, num_tokens=num_tokens, on_begin=begun.release)
            )
            for number in range(num_streams)
        ]
        for _ in range(min(num_begun, num_streams)):
            await begun.acquire()
        yield running


@dataclass(slots=True)
class Load:
    """Streams that are asked for again and again."""

    num_answers: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def repeat(self, client: AsyncClient, number: int, *, num_tokens: int, pause_s: float) -> None:
        while not self.over.is_set():
            await answer(client, number, num_tokens=num_tokens)
            self.num_answers += 1
            self._answered.set()
            await asyncio.sleep(pause_s)

    async def next_answer(self) -> None:
        self._answered.clear()
        await self._answered.wait()


@asynccontextmanager
async def repeated_streams(client: AsyncClient, *, num_tokens: int, pause_s: float = 0.0) -> AsyncIterator[Load]:
    """Run streams again and again beside the block, which begins with the first answer; pauses spare the cores."""
    load = Load()
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_STREAMS):
            tasks.create_task(load.repeat(client, number, num_tokens=num_tokens, pause_s=pause_s))
        await load.next_answer()
        try:
            yield load
        finally:
            load.over.set()
