"""Clients of a cluster on test hosts: streams side by side, and what each of them saw."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.client import AsyncClient, Generation

NUM_STREAMS = 4
NUM_TOKENS = 75
_NUM_BEGUN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Events that one client saw."""

    answer: Generation
    pauses_s: tuple[float, ...]
    """Between one event of its stream and the next."""

    @property
    def was_moved(self) -> bool:
        """Whether a second worker went on with it."""
        return len(self.answer.plans) > 1


async def stream_all(
    client: AsyncClient, meanwhile: Callable[[], Awaitable[None]] | None = None, *, num_streams: int = NUM_STREAMS
) -> list[Seen]:
    """Run the streams, the same ones each time; `meanwhile` is called once every stream has some tokens."""
    begun = [asyncio.Event() for _ in range(num_streams)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stream(client, number, event)) for number, event in enumerate(begun)]
        if meanwhile is not None:
            for event in begun:
                await event.wait()
            await meanwhile()
    return [task.result() for task in tasks]


def describe(seen: Sequence[Seen]) -> str:
    """Return one line about what the clients of all streams saw."""
    longest = sorted(max(each.pauses_s) for each in seen)
    num_tokens = sum(len(each.answer.token_ids) for each in seen)
    moved = [max(each.pauses_s) for each in seen if each.was_moved]
    told = f"client: {len(seen)} streams, {num_tokens} tokens, longest pause {longest[-1]:.2f} s"
    if not moved:
        return told
    return f"{told}; {len(moved)} streams were moved, with pauses of {min(moved):.2f} to {max(moved):.2f} s"


async def _stream(client: AsyncClient, number: int, begun: asyncio.Event) -> Seen:
    prompt = f"stream {number}: " + "what a host forgets, another one computes again; " * 4
    came_s: list[float] = []
    async with client.stream(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=number) as events:
        async for _ in events:
            came_s.append(time.monotonic())
            if len(came_s) == _NUM_BEGUN:
                begun.set()
        answer = await events.result()
    pauses_s = tuple(after - before for before, after in itertools.pairwise(came_s))
    return Seen(answer=answer, pauses_s=pauses_s)
