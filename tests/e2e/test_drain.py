"""A decode worker that drains gives its running answers away: same text, nothing fails, the KV is pulled from it."""

import asyncio
from typing import Any

import pytest

from common.structured_outputs import structure_text
from kvrelay.client import AsyncClient, Generation, Token
from tests.builders import expected_tokens, make_request
from tests.e2e.in_process import System, running_system
from tests.served_router import TIMEOUT_S

NUM_STREAMS = 4
NUM_TOKENS, SLOW_AT = 60, 10
"""Tokens of an answer, and the one from which on they are slow, where something happens in its middle."""
SHAPE: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 512, "step_s": 0.002}


def asked(number: int, *, num_phrases: int = 3, num_tokens: int = NUM_TOKENS) -> tuple[str, dict[str, Any]]:
    """Return the prompt of a stream and its options, for an answer of so many tokens; every other one is structured."""
    prompt = f"stream {number}: " + "what one worker has computed another one takes over; " * num_phrases
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": num_tokens}
    options: dict[str, Any] = {"structured_outputs": {"json": numbers}} if number % 2 else {"ignore_eos": True}
    return prompt, options | {"max_tokens": num_tokens, "seed": number, "temperature": 1.0}


async def answer(client: AsyncClient, number: int, *, begun: asyncio.Event | None = None, **length: int) -> Generation:
    prompt, options = asked(number, **length)
    async with client.stream(prompt, **options) as events:
        async for event in events:
            if begun is not None and isinstance(event, Token):
                begun.set()
        return await events.result()


def expected(number: int, **length: int) -> str:
    """Return the text of a stream that nothing disturbs."""
    prompt, options = asked(number, **length)
    if "structured_outputs" in options:
        options["structured_outputs"] = structure_text(options["structured_outputs"])
    return bytes(expected_tokens(make_request(prompt.encode(), **options))).decode()


LONG = {"num_tokens": 160}
"""For direct streams, which move only where the router knows their tokens."""
EXPECTED = [expected(number) for number in range(NUM_STREAMS)]


async def drained(system: System, worker_id: str) -> None:
    """Drain a worker and wait until nothing runs on it."""
    while (await system.drain(worker_id))[worker_id]:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.05)


async def decoding_worker(client: AsyncClient) -> str:
    """Return the only worker that runs something, as soon as workers have told the router so."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            views = (await client.status()).workers
            running = [view.worker_id for view in views if view.status is not None and view.status.load.num_running]
            if running:
                (only,) = running
                return only
            await asyncio.sleep(0.01)


async def test_drains_under_streams_change_no_text_and_fail_no_request() -> None:
    async with running_system(num_decode=3, **SHAPE) as system:
        async with system.client() as client:
            system.pace.slow_down(at=SLOW_AT)
            begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
            running = asyncio.gather(*(answer(client, n, begun=event) for n, event in enumerate(begun)))
            await asyncio.gather(*(event.wait() for event in begun))
            for worker_id in ("d0", "d1", "d2") * 2:
                await drained(system, worker_id)
            system.pace.hurry()
            done = await running
            status = (await client.status()).router
        await system.drain()

        assert [each.text for each in done] == EXPECTED
        assert status.num_failed == status.num_replans == 0
        assert min(len(each.plans) for each in done) > 2, "everybody moves at least twice"
        await system.until_idle()


async def test_moved_answer_pulls_its_kv_from_the_worker_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 30.0)  # a busy machine may take long
    # A long prompt in small, slow steps: fetching it is faster than computing it again.
    slow = SHAPE | {"max_step_tokens": 16, "step_s": 0.01}
    async with running_system(num_prefill=0, num_decode=2, router={"policy": "predictive"}, **slow) as system:
        async with system.client() as client:
            system.pace.slow_down(at=SLOW_AT)
            begun = asyncio.Event()
            running = asyncio.create_task(answer(client, 1, begun=begun, num_phrases=14))
            await begun.wait()
            left = await decoding_worker(client)
            await drained(system, left)
            system.pace.hurry()
            done = await running
            statuses = {view.worker_id: view.status for view in (await client.status()).workers}

        first, second = done.plans
        assert first.decode_worker_id == left != second.decode_worker_id
        assert second.source_worker_id == left
        taker = statuses[second.decode_worker_id]
        assert taker is not None and taker.kv_bytes_received > 0


async def test_draining_worker_gets_no_new_requests() -> None:
    async with running_system(num_prefill=2, num_decode=2, **SHAPE) as system:
        await system.drain("d0", "p1")
        async with system.client() as client:
            done = await asyncio.gather(*(answer(client, n) for n in range(NUM_STREAMS)))
            states = {view.worker_id: view.state for view in (await client.status()).workers}

        assert {plan.decode_worker_id for each in done for plan in each.plans} == {"d1"}
        assert all(plan.prefill_worker_id in (None, "p0") for each in done for plan in each.plans)
        assert states == {"p0": "ready", "p1": "draining", "d0": "draining", "d1": "ready"}


async def test_prefill_worker_is_empty_as_soon_as_its_prompts_are_handed_over() -> None:
    policy = {"policy": "round_robin", "local_prefill_max_tokens": 0}
    async with running_system(num_prefill=2, num_decode=1, router=policy, **SHAPE) as system:
        async with system.client() as client:
            system.pace.slow_down(at=SLOW_AT)
            begun = asyncio.Event()
            running = [asyncio.create_task(answer(client, n, begun=begun)) for n in range(NUM_STREAMS)]
            await begun.wait()
            await drained(system, "p0")
            assert not all(task.done() for task in running), "the answers were over before the worker was empty"
            system.pace.hurry()
            done = await asyncio.gather(*running)
            assert {plan.prefill_worker_id for each in done for plan in each.plans} == {"p0", "p1"}
            assert (await client.status()).router.num_replans == 0
        await system.until_idle()


async def test_last_decode_worker_serves_on_while_it_drains() -> None:
    async with running_system(num_decode=1, **SHAPE) as system:
        await system.drain("d0")
        async with system.client() as client:
            done = await answer(client, 1)

        assert len(done.plans) == 1


async def test_direct_stream_moves_too() -> None:
    async with running_system(num_decode=2, **SHAPE | {"step_s": 0.01}) as system:
        async with system.client(direct=True) as client:
            system.pace.slow_down(at=SLOW_AT)
            begun = asyncio.Event()
            running = asyncio.create_task(answer(client, 0, begun=begun, **LONG))
            await begun.wait()
            left = await decoding_worker(client)
            await system.drain(left)
            system.pace.hurry()
            await drained(system, left)
            done = await running

        assert done.text == expected(0, **LONG)
        assert len(done.plans) == 2
