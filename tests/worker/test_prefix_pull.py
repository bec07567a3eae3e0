"""Cached blocks that one worker pulls from another: right answers whatever happens, and nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import HandoffGone, InvalidRequest, from_rpc_error
from common.ids import mint_handoff_id
from common.rpc import client_channel
from engine.sequence import EngineRequest
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, sequence_pb2, worker_pb2
from tests.builders import BLOCK_SIZE, expected_tokens, make_request
from tests.worker.cluster import Answer, Pool, error_of, messages, running_pool
from tests.worker.scripted_source import ScriptedSource, scripted_source
from worker.prefix_pull import PullOutcome
from worker.shell import RunningWorker

OTHERS: dict[str, dict[str, Any]] = {"prefill-0": {}, "prefill-1": {}, "decode-0": {}}
PREFIX = [i * 7 % 251 for i in range(40)]
PREFIX_BLOCKS = len(PREFIX) // BLOCK_SIZE


def prompt(tail: int, **sampling: Any) -> EngineRequest:
    """Return a request for the shared prefix and a tail of its own."""
    return make_request([*PREFIX, *([tail] * 7)], ignore_eos=True, **sampling)


def where(worker: RunningWorker, num_blocks: int = PREFIX_BLOCKS, **changes: Any) -> sequence_pb2.KvSource:
    """Return the message that names a worker as a source."""
    fields: dict[str, Any] = {
        "worker_id": worker.runtime.worker_id,
        "address": worker.address,
        "epoch": worker.runtime.epoch,
    }
    return sequence_pb2.KvSource(**(fields | {"num_blocks": num_blocks} | changes))


def outcomes(worker: RunningWorker) -> dict[PullOutcome, int]:
    return dict(worker.runtime.prefixes.outcomes)


@asynccontextmanager
async def warm_pool(*, transports: tuple[str, ...] = ("grpc",), **fakes: dict[str, Any]) -> AsyncIterator[Pool]:
    """Start two prefill workers and a decode worker; prefill-0 has the prefix in its cache."""
    named = {name: fakes.get(name.replace("-", "_"), {}) for name in OTHERS}
    async with running_pool(named, transports=transports) as pool:
        await pool.pair("prefill-0", "decode-0").generate(prompt(1, max_tokens=1))
        yield pool


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_prefix_pulled_by_another_prefill_worker_gives_the_same_answer(transport: str) -> None:
    async with warm_pool(transports=(transport,)) as pool:
        source, puller = pool.workers["prefill-0"], pool.workers["prefill-1"]
        sent_before = source.runtime.bytes_sent.total()
        answer = await pool.pair("prefill-1", "decode-0").generate(prompt(2), where(source))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (40, 40)
        assert outcomes(puller) == {PullOutcome.PULLED: 1}
        block_bytes = source.runtime.executor.kv.shape.block_bytes
        assert source.runtime.bytes_sent.total() - sent_before == PREFIX_BLOCKS * block_bytes
        again = await pool.pair("prefill-1", "decode-0").generate(prompt(3))
        assert (again.num_cached, again.num_pulled) == (40, 0), "published, for everybody"
        await pool.until_empty()


@pytest.mark.parametrize("length", [BLOCK_SIZE * k + d for k in (1, 5) for d in (-1, 0, 1)])
async def test_pull_of_a_whole_prompt_leaves_its_last_token_to_be_computed(length: int) -> None:
    async with running_pool(OTHERS) as pool:
        request = make_request(PREFIX[:length], ignore_eos=True)
        await pool.pair("prefill-0", "decode-0").generate(request)
        source = where(pool.workers["prefill-0"], length // BLOCK_SIZE)
        answer = await pool.pair("prefill-1", "decode-0").generate(request, source)
        assert answer.tokens[0] == expected_tokens(request)
        assert answer.num_pulled == answer.num_cached == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        await pool.until_empty()


async def test_pull_skips_what_is_here_already() -> None:
    async with warm_pool() as pool:
        source = pool.workers["prefill-0"]
        pair = pool.pair("prefill-1", "decode-0")
        await pair.generate(make_request(PREFIX[:12], ignore_eos=True))
        answer = await pair.generate(prompt(2), where(source))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (40, 28)
        known = await pair.generate(prompt(3), where(source))
        assert (known.num_cached, known.num_pulled) == (40, 0)
        assert outcomes(pair.prefill) == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 1}
        await pool.until_empty()


async def test_pull_when_the_source_has_evicted_a_part_computes_the_rest() -> None:
    async with running_pool(OTHERS) as pool:
        await pool.pair("prefill-0", "decode-0").generate(make_request(PREFIX[:21], ignore_eos=True))
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), where(pool.workers["prefill-0"]))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (20, 20)
        assert outcomes(pair.prefill) == {PullOutcome.PARTIAL: 1}
        await pool.until_empty()


async def test_pull_when_the_source_has_nothing_computes_everything() -> None:
    async with running_pool(OTHERS) as pool:
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), where(pool.workers["prefill-0"]))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (0, 0)
        assert outcomes(pair.prefill) == {PullOutcome.EVICTED: 1}
        await pool.until_empty()


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
        assert remote.tokens[0] == expected_tokens(turn)
        held = len(first.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
        # The last token of an answer is never computed: nothing follows it.
        assert remote.num_cached == (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert remote.num_pulled == remote.num_cached - held
        await pool.until_empty()


async def test_local_plan_pulls_a_prefix_from_another_decode_worker() -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {}, "decode-1": {}}) as pool:
        await pool.pair("prefill-0", "decode-0").generate_locally(prompt(1))
        answer = await pool.pair("prefill-0", "decode-1").generate_locally(prompt(2), where(pool.workers["decode-0"]))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (40, 40)
        await pool.until_empty()


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({"epoch": 5}, PullOutcome.STALE), ({"address": "127.0.0.1:1", "worker_id": "nobody"}, PullOutcome.LOST)],
)
async def test_pull_from_a_source_that_is_gone_computes_instead(changes: dict[str, Any], outcome: PullOutcome) -> None:
    async with warm_pool() as pool:
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), where(pool.workers["prefill-0"], **changes))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (0, 0)
        assert outcomes(pair.prefill) == {outcome: 1}
        await pool.until_empty()


async def test_pull_from_a_source_of_another_layout_computes_instead() -> None:
    async with warm_pool() as pool:
        store: Any = pool.workers["prefill-0"].runtime.executor.kv
        store.shape = type(store)(num_blocks=1, block_size=8).shape
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), where(pool.workers["prefill-0"]))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert outcomes(pair.prefill) == {PullOutcome.LAYOUT: 1}


async def lie(source: ScriptedSource, _opened: pb.OpenFetch, context: Any) -> None:
    await source.send(context, 0, 4)
    await source.send_manifest(context, PREFIX_BLOCKS)


async def stall(source: ScriptedSource, _opened: pb.OpenFetch, context: Any) -> None:
    await source.send(context, 0, 4)
    source.asked.set()
    await source.may_go_on.wait()
    await source.send(context, 4, PREFIX_BLOCKS)
    await source.send_manifest(context, PREFIX_BLOCKS)


async def test_pull_from_a_source_that_dies_in_the_middle_computes_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        pulling = asyncio.create_task(pair.generate(prompt(2), source.where(PREFIX_BLOCKS)))
        await source.asked.wait()
        await source.die()
        answer = await pulling
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (0, 0), "nothing unverified is published"
        assert outcomes(pair.prefill) == {PullOutcome.LOST: 1}
        await pool.until_empty()


async def test_pull_from_a_source_that_lies_computes_instead() -> None:
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), lie) as source:
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), source.where(PREFIX_BLOCKS))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (0, 0)
        assert outcomes(pair.prefill) == {PullOutcome.INCOMPLETE: 1}
        await pool.until_empty()


async def test_pull_that_takes_too_long_is_given_up_and_the_source_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 0.05)
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        answer = await pair.generate(prompt(2), source.where(PREFIX_BLOCKS))
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert outcomes(pair.prefill) == {PullOutcome.TIMEOUT: 1}
        async with asyncio.timeout(5):
            await source.ended.wait()
        await pool.until_empty()


async def test_others_are_computed_while_a_pull_waits_and_the_pull_keeps_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        pulling = asyncio.create_task(pair.generate(prompt(2), source.where(PREFIX_BLOCKS)))
        await source.asked.wait()
        other = make_request(range(30), ignore_eos=True)
        assert (await pair.generate(other)).tokens[0] == expected_tokens(other)
        assert not pulling.done()
        source.may_go_on.set()
        answer = await pulling
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (40, 40)
        await pool.until_empty()


@pytest.mark.parametrize("who", ["router", "decode worker", "router of a local plan"])
async def test_cancel_while_pulling_frees_everything_and_tells_the_source(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        handoff_id = mint_handoff_id()
        where = source.where(PREFIX_BLOCKS)
        if who == "router of a local plan":
            decode = pair.open_decode(prompt(2), None, where)
            reading = asyncio.ensure_future(decode.read())
            await source.asked.wait()
            decode.cancel()
            await asyncio.wait([reading])
        else:
            decode = pair.open_decode(prompt(2), handoff_id)
            await decode.read()
            prefill = pair.open_prefill(prompt(2), handoff_id, where)
            await source.asked.wait()
            first, second = (prefill, decode) if who == "router" else (decode, prefill)
            first.cancel()
            assert isinstance(from_rpc_error(await error_of(second)), HandoffGone)
        async with asyncio.timeout(5):
            await source.ended.wait()
        await pool.until_empty()
        puller = pair.decode if who == "router of a local plan" else pair.prefill
        assert outcomes(puller) == {PullOutcome.CANCELLED: 1}


async def test_pull_without_room_computes_instead() -> None:
    async with warm_pool(prefill_1={"num_blocks": 20, "lease_ttl_s": 60.0}) as pool:
        pair = pool.pair("prefill-1", "decode-0")
        handoff_id = mint_handoff_id()
        held = make_request(range(44), ignore_eos=True)
        async for _message in messages(pair.open_prefill(held, handoff_id)):
            pass  # its 11 pages wait for a puller
        waiting = asyncio.create_task(pair.generate(prompt(2), where(pool.workers["prefill-0"])))
        while not outcomes(pair.prefill):
            await pair.prefill.runtime.engine.call(lambda _core: None)
        assert outcomes(pair.prefill) == {PullOutcome.NO_ROOM: 1}
        async for _message in messages(pair.open_decode(held, handoff_id)):
            pass
        answer = await waiting
        assert answer.tokens[0] == expected_tokens(prompt(2))
        assert answer.num_pulled == 0
        await pool.until_empty()


async def test_requests_that_pull_the_same_prefix_at_once_move_it_once() -> None:
    async with warm_pool() as pool:
        source = pool.workers["prefill-0"]
        pair = pool.pair("prefill-1", "decode-0")
        requests = [prompt(tail, max_tokens=3) for tail in range(2, 8)]
        answers: list[Answer] = await asyncio.gather(*(pair.generate(r, where(source)) for r in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer.tokens[0] == expected_tokens(request)
            assert answer.num_cached == 40
        assert sorted(answer.num_pulled for answer in answers) == [0, 0, 0, 0, 0, 40]
        assert outcomes(pair.prefill) == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 5}
        await pool.until_empty()


async def test_request_whose_sibling_gives_up_its_pull_pulls_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        first = asyncio.create_task(pair.generate(prompt(2), source.where(PREFIX_BLOCKS)))
        await source.asked.wait()
        second = asyncio.create_task(pair.generate(prompt(3), source.where(PREFIX_BLOCKS)))
        while pair.prefill.runtime.num_request_tasks < 2:
            await pair.prefill.runtime.engine.call(lambda _core: None)
        source.may_go_on.set()
        first.cancel()
        answer = await second
        assert answer.tokens[0] == expected_tokens(prompt(3))
        assert answer.num_cached == 40
        await pool.until_empty()


async def test_lease_of_a_puller_that_says_nothing_more_ends_with_the_time_to_live() -> None:
    async with warm_pool(prefill_0={"lease_ttl_s": 0.1}) as pool:
        worker = pool.workers["prefill-0"]
        channel = client_channel(worker.address)
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        await call.write(pb.FetchBlocksRequest(open=_open(worker, prompt(1).block_hashes.packed)))
        assert isinstance(from_rpc_error(await error_of(call)), HandoffGone)
        await channel.close()
        await pool.until_empty()


@pytest.mark.parametrize("hashes", [b"", b"x" * 17])
async def test_fetch_of_malformed_hashes_is_refused_by_field(hashes: bytes) -> None:
    async with running_pool(OTHERS) as pool:
        worker = pool.workers["prefill-0"]
        channel = client_channel(worker.address)
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        await call.write(pb.FetchBlocksRequest(open=_open(worker, hashes)))
        error = from_rpc_error(await error_of(call))
        assert isinstance(error, InvalidRequest)
        assert error.field == "block_hashes"
        await channel.close()
        await pool.until_empty()


def _open(worker: RunningWorker, hashes: bytes) -> pb.OpenFetch:
    runtime = worker.runtime
    return pb.OpenFetch(
        epoch=runtime.epoch,
        layout_fingerprint=runtime.executor.kv.shape.fingerprint,
        transports=[worker_pb2.KV_TRANSPORT_GRPC],
        block_hashes=hashes,
    )
