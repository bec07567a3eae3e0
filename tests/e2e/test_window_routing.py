"""A router places prompts by what workers can use of their caches, when their models have windows or states."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.block_hash import BlockHashes
from common.ids import WorkerId
from common.kv_events import KvEvents
from engine.executor import Executor
from engine.fake import FakeExecutor
from engine.fake_pages import FakeWindow
from kvrelay.client import Generation
from tests.builders import BLOCK_SIZE
from tests.e2e.in_process import System, running_system
from tests.served_router import TIMEOUT_S

ROUTER: dict[str, Any] = {"policy": "longest_prefix", "local_prefill_max_tokens": 0}
WINDOWS = pytest.mark.parametrize(
    "window",
    [
        FakeWindow(num_tokens=10, num_pages=20),
        FakeWindow(num_tokens=10, num_pages=20, is_chunk=True),
        FakeWindow(num_tokens=1, num_pages=14, is_state=True),
    ],
    ids=["window", "chunks", "state"],
)


@asynccontextmanager
async def running(window: FakeWindow) -> AsyncIterator[System]:
    """Start two prefill workers and a decode worker whose models have this layer."""

    def load() -> Executor:
        executor = FakeExecutor(num_blocks=600, block_size=BLOCK_SIZE, max_model_len=1024)
        executor.add_window(window)
        return executor

    async with running_system(num_prefill=2, router=ROUTER, load=load) as system:
        yield system


def has_heard(system: System, worker_id: WorkerId, events: KvEvents) -> bool:
    """Return whether a router knows which of a worker's blocks have window pages, and expects nothing any more."""
    index, paged = system.router.door.parts.index, set(events.paged)
    alone = ((each, index.match(BlockHashes.of((each,)), num_usable=1)) for each in events.stored)
    return not index.num_expected and all(found.get(worker_id) == (each in paged) for each, found in alone)


async def ask(system: System, prompt: list[int], **sampling: Any) -> Generation:
    """Return an answer, when the router has heard of all that the workers hold then."""
    async with system.client() as client:
        answer = await client.generate(prompt, **{"max_tokens": 1, "temperature": 0.0, "ignore_eos": True} | sampling)
    await system.until_idle()
    for worker in system.workers.values():
        events = await worker.runtime.engine.call(lambda core: core.snapshot())
        async with asyncio.timeout(TIMEOUT_S):
            while not has_heard(system, worker.runtime.worker_id, events):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.001)
    return answer


def text(seed: int, num_blocks: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(32, 127) for i in range(num_blocks * BLOCK_SIZE)]


@WINDOWS
async def test_worker_with_the_window_is_preferred_to_one_with_more_blocks(window: FakeWindow) -> None:
    async with running(window) as system:
        shared, rest = text(1, 10), text(2, 10)
        await system.drain("p1")
        for prompt in ([*shared, *rest], text(3, 20), text(4, 20)):
            await ask(system, prompt)
        await system.drain("p0")
        await ask(system, shared)
        await system.drain()
        both = [*shared, *rest]
        forked = await ask(system, [*both[: 14 * BLOCK_SIZE], *text(5, 3)])
        assert (forked.plans[-1].prefill_worker_id, forked.usage.num_cached_tokens) == ("p1", len(shared))
        whole = await ask(system, [*both, 40, 41])
        assert (whole.plans[-1].prefill_worker_id, whole.usage.num_cached_tokens) == ("p0", len(both))
        for answer in (forked, whole):
            assert answer.plans[-1].predicted_cached_tokens == answer.usage.num_cached_tokens


@WINDOWS
async def test_cached_tokens_of_chats_are_those_that_were_predicted(window: FakeWindow) -> None:
    async with running(window) as system:
        chances = random.Random(3)
        chats = [[*text(chances.randrange(2), 6), *text(10 + i, chances.randrange(1, 5))] for i in range(5)]
        found: list[int] = []
        for turn in range(4):
            for i, chat in enumerate(chats):
                answer = await ask(system, chat, max_tokens=chances.randrange(1, 30))
                assert answer.plans[-1].predicted_cached_tokens == answer.usage.num_cached_tokens
                found.append(answer.usage.num_cached_tokens)
                chat += [*answer.samples[0].token_ids, *text(100 * turn + i, 2)[turn:]]
        assert sum(map(bool, found)) > len(found) // 2
