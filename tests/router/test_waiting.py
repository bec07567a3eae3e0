"""Requests that wait, are refused, or given up: by workers without room, a full line, a deadline, their client."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest

from common.errors import DeadlineExceeded, Overloaded, WorkerLost
from kvrelay.v1 import inference_pb2
from router.placement.limits import MAX_RETRY_S
from tests.router.embeddings import embedding_of
from tests.router.fake_worker import DECODE, TIMEOUT_S, FakeWorker, Shape, answer, full_pair, held_pair, pair
from tests.router.fakes import Reply, TestCluster, config_with, make_request, prompt_of, running_cluster


async def test_generate_before_any_worker_waits_for_one() -> None:
    decode = FakeWorker("d0", DECODE)
    async with running_cluster() as cluster:
        assert not (await cluster.inference.ListModels(inference_pb2.ListModelsRequest())).models
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until_queued(1)
        await decode.start()
        await cluster.set_workers(decode)
        assert (await generating).token_ids() == answer(prompt_of(10), 6)
        await decode.die()


async def test_generate_without_any_worker_fails_after_the_queue_timeout() -> None:
    async with running_cluster(config=config_with(queue_timeout_s=0.05)) as cluster:
        with pytest.raises(WorkerLost, match="no decode worker"):
            await cluster.generate(make_request())
        await cluster.until_idle()


async def test_generate_when_decode_refuses_waits_until_its_load_changes(cluster: TestCluster) -> None:
    cluster.decode.num_refusals = 1  # and asks to come back in 30 s, longer than the test may take
    generating = asyncio.create_task(cluster.generate(make_request(10)))
    await cluster.until_queued(1)
    await cluster.until(lambda _router: cluster.decode.requests)
    await cluster.until_queued(1)
    cluster.decode.set_load(num_free_blocks=40)
    reply = await generating
    assert reply.token_ids() == answer(prompt_of(10), 6)
    assert (reply.completed.num_attempts, len(cluster.decode.requests)) == (1, 2)
    assert (await cluster.until_idle()).num_replans == 0


async def test_generate_when_decode_refuses_asks_again_after_the_time_it_named(cluster: TestCluster) -> None:
    cluster.decode.num_refusals, cluster.decode.retry_after_s = 2, 0.02
    assert (await cluster.generate(make_request(10))).token_ids() == answer(prompt_of(10), 6)
    assert len(cluster.decode.requests) == 3


async def test_slot_of_a_worker_with_pages_is_noticed_beside_slots_and_pages_of_others() -> None:
    slots_alone, with_both, pages_alone = workers = [FakeWorker(f"d{number}", DECODE) for number in range(3)]
    slots_alone.set_load(num_running=20, num_free_slots=5, num_free_blocks=1)
    with_both.set_load(num_running=20, num_free_slots=0, num_free_blocks=10)
    pages_alone.set_load(num_running=20, num_free_slots=0)
    async with running_cluster(*workers) as cluster:
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until_queued(1)
        with_both.set_load(num_free_slots=1)
        assert [plan.decode_worker_id for plan in (await generating).plans] == ["d1"]


async def test_generate_when_prefill_refuses_releases_decode_and_waits(cluster: TestCluster) -> None:
    cluster.prefill.num_refusals = 1
    generating = asyncio.create_task(cluster.generate(make_request(10)))
    await cluster.until(lambda _router: cluster.prefill.requests and not cluster.decode.num_running_calls)
    cluster.prefill.set_load(num_waiting=1)
    assert (await generating).token_ids() == answer(prompt_of(10), 6)
    await cluster.until_idle()


async def test_generate_when_refused_for_too_long_is_overloaded_with_retry_info() -> None:
    prefill, decode = pair()
    decode.num_refusals = 1
    async with running_cluster(prefill, decode, config=config_with(queue_timeout_s=0.2)) as cluster:
        with pytest.raises(Overloaded) as caught:
            await cluster.generate(make_request())
        assert caught.value.retry_after_s is not None
        assert 0.1 < caught.value.retry_after_s <= MAX_RETRY_S  # the line has stood still for 0.2 s
        await cluster.until_idle()


async def test_generate_never_books_more_pages_than_decode_has() -> None:
    prefill, decode = pair()
    decode.shape = Shape(num_blocks=8)
    decode.report.num_blocks = decode.report.num_free_blocks = 8
    decode.gates.close("reserve")  # no reservation is acknowledged, no report comes: only bookings count
    async with running_cluster(prefill, decode, config=config_with(silence_s=None)) as cluster:
        # 10 tokens: 2 full blocks and one more, so two requests fit into 8 pages and a third does not.
        generating = [asyncio.create_task(cluster.generate(make_request(10, max_tokens=1))) for _ in range(3)]
        status = await cluster.until(lambda router: router.num_active == len(decode.requests) == 2)
        assert status.num_queued == 1
        decode.gates.open("reserve")
        replies = await asyncio.gather(*generating)
        assert [reply.token_ids() for reply in replies] == [answer(prompt_of(10), 1)] * 3
        await cluster.until_idle()


async def test_generate_after_short_answers_lets_requests_with_high_limits_share_a_worker() -> None:
    prefill, decode = pair()
    decode.shape = Shape(num_blocks=16)
    decode.report.num_blocks = decode.report.num_free_blocks = 16
    short = make_request(10, max_tokens=40, stop_token_ids=answer(prompt_of(10), 1))
    async with running_cluster(prefill, decode) as cluster:
        for _ in range(20):  # nothing is known at first: an answer of 40 tokens would fill 10 pages
            await cluster.generate(short)
        decode.gates.close("reserve")
        generating = [asyncio.create_task(cluster.generate(short)) for _ in range(2)]
        await cluster.until(lambda router: router.num_active == 2)
        decode.gates.open("reserve")
        await asyncio.gather(*generating)


async def test_generate_when_queue_is_full_is_refused_with_retry_info() -> None:
    prefill, decode = full_pair()
    async with running_cluster(prefill, decode, config=config_with(max_queued=2)) as cluster:
        replies = await cluster.queue(make_request(10), make_request(10))
        for refused in (cluster.generate(make_request()), cluster.embed(embedding_of())):
            with pytest.raises(Overloaded, match="limit is 2") as caught:
                await refused
            assert caught.value.retry_after_s is not None
        decode.set_load(num_free_blocks=64)
        for reply in await replies:
            assert reply.token_ids() == answer(prompt_of(10), 6)
        ended = await cluster.until_idle()
        assert (ended.num_failed, ended.num_rejected) == (0, 2)


@pytest.mark.parametrize("gate", ["queue", "reserve", "prefill", "first_token", "token 2"])
async def test_generate_when_deadline_passes_frees_everything(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The router's own limit, not the client's: that may pass before the request has come to the router.
    monkeypatch.setattr("router.doors.front_door.MAX_REQUEST_S", 0.3)
    async with running_cluster(*held_pair(gate)) as cluster:
        with pytest.raises(DeadlineExceeded):
            await cluster.generate(make_request(10))
        status = await cluster.until_idle()
        assert (status.num_failed, status.num_cancelled) == (1, 0)


@pytest.mark.parametrize("gate", ["queue", "reserve", "prefill", "first_token", "fetch", "token 1", "token 3"])
async def test_generate_when_client_cancels_frees_everything(gate: str) -> None:
    async with running_cluster(*held_pair(gate)) as cluster:
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until_held(gate)
        generating.cancel()
        status = await cluster.until_idle()
        assert (status.num_cancelled, status.num_failed, status.num_completed) == (1, 0, 0)
        calls = cluster.decode.calls
        assert calls["cancelled"] == calls["started"] == (0 if gate == "queue" else 1)


async def test_client_that_leaves_while_a_message_is_written_is_no_failure(cluster: TestCluster) -> None:
    door = cluster.router.door
    with pytest.raises(grpc.aio.InternalError), door.account(door.new_life()):
        raise grpc.aio.InternalError("a write of a call that has ended")
    status = await cluster.until_idle()
    assert (status.num_cancelled, status.num_failed) == (1, 0)


async def test_generate_when_a_storm_of_clients_cancels_frees_everything(cluster: TestCluster) -> None:
    calls = [cluster.inference.Generate(make_request(8 + i % 9), timeout=TIMEOUT_S) for i in range(60)]

    async def read_some(number: int, call: Any) -> None:
        reply = Reply()
        if number % 2:
            with suppress(asyncio.CancelledError):
                async for message in call:
                    reply.messages.append(message)
                    if len(reply.messages) > number % 8:
                        call.cancel()
        else:
            await cluster.read(call, reply)
            assert reply.token_ids() == answer(prompt_of(8 + number % 9), 6)

    await asyncio.gather(*(read_some(i, call) for i, call in enumerate(calls)))
    status = await cluster.until_idle()
    assert status.num_failed == 0
    assert status.num_completed + status.num_cancelled == 60
    assert status.num_completed >= 30
