"""Cached blocks that one worker pulls from another: answers are right, and later requests find the blocks."""

import asyncio

import pytest

from common.ids import WorkerId
from engine.fake_pages import FakeWindow
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.clock import ManualClock
from tests.transfer.device_sharing import Card, put_on_card
from tests.worker.calls import Answer
from tests.worker.cluster import running_pool, watched
from tests.worker.prefixes import OTHERS, PREFIX, PREFIX_BLOCKS, outcomes, prompt, warm_pool, where
from worker.prefix_pull import PullOutcome
from worker.timing import LINK_MEMORY_S, WorkerTiming


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_prefix_pulled_by_another_prefill_worker_gives_the_same_answer(transport: str) -> None:
    async with warm_pool(transports=(transport,)) as pool:
        source, puller = pool.workers["prefill-0"], pool.workers["prefill-1"]
        sent_before = source.runtime.bytes_sent.total()
        answer = await pool.pair("prefill-1", "decode-0").generate(prompt(2), where(source))
        assert (answer.num_cached, answer.num_pulled) == (40, 40)
        assert outcomes(puller) == {PullOutcome.PULLED: 1}
        block_bytes = source.runtime.executor.kv.shape.block_bytes
        assert source.runtime.bytes_sent.total() - sent_before == PREFIX_BLOCKS * block_bytes
        again = await pool.pair("prefill-1", "decode-0").generate(prompt(3))
        assert (again.num_cached, again.num_pulled) == (40, 0), "published, for all requests"


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize(
    "fake_window",
    [FakeWindow(num_tokens=10, num_pages=60), FakeWindow(num_tokens=1, num_pages=60, is_state=True)],
    ids=["window", "state"],
)
async def test_pulled_prefix_has_the_window_or_state_before_its_end(transport: str, fake_window: FakeWindow) -> None:
    window = {"window": fake_window}
    async with running_pool(dict.fromkeys(OTHERS, window), transports=(transport,)) as pool:
        source = pool.workers["prefill-0"]
        await pool.pair("prefill-0", "decode-0").generate(make_request(PREFIX, max_tokens=1, ignore_eos=True))
        for tail in (2, 3):
            answer = await pool.pair("prefill-1", "decode-0").generate(prompt(tail, max_tokens=30), where(source))
            assert (answer.num_cached, answer.num_pulled) == (40, 40 if tail == 2 else 0)


async def test_prefix_is_pulled_inside_a_card_that_both_workers_use() -> None:
    card = Card()
    async with running_pool(OTHERS, transports=("cuda_ipc", "grpc")) as pool:
        for worker in pool.workers.values():
            put_on_card(worker, card)
        await pool.pair("prefill-0", "decode-0").generate(prompt(1, max_tokens=1))
        source, puller = pool.workers["prefill-0"], pool.workers["prefill-1"]
        answer = await pool.pair("prefill-1", "decode-0").generate(prompt(2), where(source))
        assert answer.num_pulled == 40
        assert set(puller.runtime.bytes_received) == {worker_pb2.KV_TRANSPORT_CUDA_IPC}


async def test_pulls_are_measured_for_the_model_of_their_link() -> None:
    async with warm_pool() as pool:
        timing = pool.workers["prefill-1"].runtime.timing
        assert not timing.transports
        await pool.pair("prefill-1", "decode-0").generate(prompt(2), where(pool.workers["prefill-0"]))
        assert timing.transports == {"prefill-0": worker_pb2.KV_TRANSPORT_GRPC}


async def test_routers_hear_that_an_idle_link_is_forgotten() -> None:
    async with warm_pool() as pool:
        runtime, clock = pool.workers["prefill-1"].runtime, ManualClock()
        runtime.timing = WorkerTiming(max_step_tokens=runtime.timing.model.max_step_tokens, clock=clock)
        runtime.timing.observe_pull(WorkerId("prefill-0"), worker_pb2.KV_TRANSPORT_SHM, 1 << 20, 5.0)
        async with watched(pool, "prefill-1") as updates:
            first = await updates.read()
            assert {link.peer_worker_id for link in first.timing.links} == {"prefill-0", ""}
            clock.advance(LINK_MEMORY_S)
            runtime.sweep()
            second = await updates.read()
            assert second.HasField("timing")
            assert not second.timing.links


@pytest.mark.parametrize("length", [BLOCK_SIZE * k + d for k in (1, 5) for d in (-1, 0, 1)])
async def test_pull_of_a_whole_prompt_leaves_its_last_token_to_be_computed(length: int) -> None:
    async with running_pool(OTHERS) as pool:
        request = make_request(PREFIX[:length], ignore_eos=True)
        await pool.pair("prefill-0", "decode-0").generate(request)
        source = where(pool.workers["prefill-0"], length // BLOCK_SIZE)
        answer = await pool.pair("prefill-1", "decode-0").generate(request, source)
        assert answer.num_pulled == answer.num_cached == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_pull_skips_what_is_here_already() -> None:
    async with warm_pool() as pool:
        source = pool.workers["prefill-0"]
        pair = pool.pair("prefill-1", "decode-0")
        await pair.generate(make_request(PREFIX[:12], ignore_eos=True))
        answer = await pair.generate(prompt(2), where(source))
        assert (answer.num_cached, answer.num_pulled) == (40, 28)
        known = await pair.generate(prompt(3), where(source))
        assert (known.num_cached, known.num_pulled) == (40, 0)
        assert outcomes(pair.prefill) == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 1}


@pytest.mark.parametrize(
    ("num_held", "num_pulled", "outcome"), [(21, 20, PullOutcome.PARTIAL), (0, 0, PullOutcome.EVICTED)]
)
async def test_pull_when_the_source_has_not_all_blocks_computes_the_rest(
    num_held: int, num_pulled: int, outcome: PullOutcome
) -> None:
    async with running_pool(OTHERS) as pool:
        if num_held:
            await pool.pair("prefill-0", "decode-0").generate(make_request(PREFIX[:num_held], ignore_eos=True))
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), where(pool.workers["prefill-0"]))
        assert (answer.num_cached, answer.num_pulled) == (num_pulled, num_pulled)
        assert outcomes(pair.prefill) == {outcome: 1}


async def test_pull_of_another_tenants_prefix_finds_nothing() -> None:
    async with warm_pool() as pool:
        request = make_request(prompt(2).prompt_token_ids, salt="another tenant", ignore_eos=True)
        answer = await pool.pair("prefill-1", "decode-0").generate(request, where(pool.workers["prefill-0"]))
        assert answer.num_pulled == 0
        assert outcomes(pool.workers["prefill-1"]) == {PullOutcome.EVICTED: 1}


async def test_next_turn_of_a_chat_pulls_the_answer_from_the_decode_worker() -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {}, "decode-1": {}}) as pool:
        first = prompt(1, max_tokens=20)
        answer = await pool.pair("prefill-0", "decode-0").generate(first)
        history = [*first.prompt_token_ids, *answer.tokens[0]]
        source = where(pool.workers["decode-0"], (len(history) - 1) // BLOCK_SIZE)
        turn = make_request([*history, 5, 6, 7], ignore_eos=True)
        remote = await pool.pair("prefill-0", "decode-1").generate(turn, source)
        held = len(first.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
        # The last token of an answer is never computed: nothing follows it.
        assert remote.num_cached == (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert remote.num_pulled == remote.num_cached - held


async def test_local_plan_pulls_a_prefix_from_another_decode_worker() -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {}, "decode-1": {}}) as pool:
        await pool.pair("prefill-0", "decode-0").generate_locally(prompt(1))
        answer = await pool.pair("prefill-0", "decode-1").generate_locally(prompt(2), where(pool.workers["decode-0"]))
        assert (answer.num_cached, answer.num_pulled) == (40, 40)


async def test_requests_that_pull_the_same_prefix_at_once_move_it_once() -> None:
    async with warm_pool() as pool:
        source = pool.workers["prefill-0"]
        pair = pool.pair("prefill-1", "decode-0")
        requests = [prompt(tail, max_tokens=3) for tail in range(2, 8)]
        answers: list[Answer] = await asyncio.gather(*(pair.generate(r, where(source)) for r in requests))
        assert [answer.num_cached for answer in answers] == [40] * 6
        assert sorted(answer.num_pulled for answer in answers) == [0, 0, 0, 0, 0, 40]
        assert outcomes(pair.prefill) == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 5}
