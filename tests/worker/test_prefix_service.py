"""Hot prefixes over real gRPC: named by one worker, taken in by another, in exchange for what is worth less only."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidRequest, KvrelayError, StaleEpoch, WorkerLost
from common.ids import Epoch, WorkerId
from common.trust.tickets import ANY_CACHED, PullRight
from kvrelay.v1 import prefix_pb2, prefix_pb2_grpc, sequence_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.rpc import answer_of
from tests.trust import CONTROLLER, as_controller
from tests.worker.cluster import Pool, running_pool, until_empty
from tests.worker.prefixes import PREFIX, PREFIX_BLOCKS, prompt, warm_pool, where
from worker.serving import RunningWorker, _until_quiet

MIB = 1 << 20


@asynccontextmanager
async def prefixes_of(worker: RunningWorker) -> AsyncIterator[Any]:
    async with as_controller(worker.address) as channel:
        yield prefix_pb2_grpc.PrefixServiceStub(channel)


async def hot(worker: RunningWorker, max_blocks: int = 1000) -> Sequence[prefix_pb2.PrefixChain]:
    async with prefixes_of(worker) as stub:
        return list((await stub.ListHotPrefixes(prefix_pb2.ListHotPrefixesRequest(max_blocks=max_blocks))).chains)


async def pull(
    worker: RunningWorker,
    source: sequence_pb2.KvSource,
    chains: Sequence[prefix_pb2.PrefixChain],
    *,
    max_bytes: int = MIB,
    time_limit_s: float = 60.0,
) -> prefix_pb2.PullPrefixesResponse:
    right = PullRight(
        puller=worker.runtime.worker_id,
        source=WorkerId(source.worker_id),
        epoch=Epoch(source.epoch),
        subject=ANY_CACHED,
    )
    source.ticket = CONTROLLER.issue(right)
    async with prefixes_of(worker) as stub:
        request = prefix_pb2.PullPrefixesRequest(
            source=source, chains=chains, max_bytes=max_bytes, time_limit_s=time_limit_s
        )
        response: prefix_pb2.PullPrefixesResponse = await answer_of(stub.PullPrefixes(request))
        return response


@asynccontextmanager
async def taking(**options: Any) -> AsyncIterator[tuple[Pool, RunningWorker, RunningWorker]]:
    """Yield a `warm_pool`, the worker that has the prefix, and one that takes it in."""
    async with warm_pool(**options) as pool:
        yield pool, pool.workers["prefill-0"], pool.workers["prefill-1"]


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_prefix_that_was_taken_in_is_found_by_the_next_request(transport: str) -> None:
    async with taking(transports=(transport,)) as (pool, source, taker):
        took = await pull(taker, where(source), await hot(source))
        answer = await pool.pair("prefill-1", "decode-0").generate(prompt(1))
        assert (took.num_pulled_blocks, took.num_present_blocks, took.num_left_blocks) == (PREFIX_BLOCKS + 1, 0, 0)
        assert answer.num_cached == (PREFIX_BLOCKS + 1) * BLOCK_SIZE


async def test_blocks_that_are_here_are_not_pulled_again() -> None:
    async with taking() as (pool, source, taker):
        await pool.pair("prefill-1", "decode-0").generate(make_request(PREFIX, max_tokens=1))
        took = await pull(taker, where(source), await hot(source))
        assert (took.num_pulled_blocks, took.num_present_blocks, took.num_left_blocks) == (1, PREFIX_BLOCKS, 0)


async def test_reused_prefix_stays_warm_where_it_is_taken_in() -> None:
    async with taking() as (pool, source, taker):
        await pool.pair("prefill-0", "decode-0").generate(prompt(2, max_tokens=1))
        await pull(taker, where(source), await hot(source))
        await until_empty(taker)
        load = await taker.runtime.engine.call(lambda core: core.load())
        assert load.num_blocks - load.num_cold_blocks == PREFIX_BLOCKS


async def test_more_valuable_blocks_are_not_displaced() -> None:
    async with taking(prefill_1={"num_blocks": 20}) as (pool, source, taker):
        pair = pool.pair("prefill-1", "decode-0")
        for _ in range(2):  # the second time makes its prompt warm
            await pair.generate(make_request([1] * (16 * BLOCK_SIZE), max_tokens=1, ignore_eos=True))
        kept = await hot(taker)
        took = await pull(taker, where(source), await hot(source))
        warm_before = kept[0].block_hashes[: 16 * kept[0].num_reused_blocks]
        assert took.num_pulled_blocks < PREFIX_BLOCKS + 1
        assert took.num_left_blocks == PREFIX_BLOCKS + 1 - took.num_pulled_blocks
        assert any(chain.block_hashes.startswith(warm_before) for chain in await hot(taker))


async def test_bytes_bound_what_is_taken_in_at_whole_blocks() -> None:
    async with taking() as (_pool, source, taker):
        block_bytes = source.runtime.executor.kv.shape.block_bytes
        took = await pull(taker, where(source), await hot(source), max_bytes=3 * block_bytes + 1)
        assert (took.num_pulled_blocks, took.num_left_blocks) == (3, PREFIX_BLOCKS - 2)


async def test_long_chain_comes_in_pieces_and_serving_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with taking() as (_pool, source, taker):
        monkeypatch.setattr("worker.prefix_service.PIECE_BYTES", 2 * source.runtime.executor.kv.shape.block_bytes)
        took = await pull(taker, where(source), await hot(source))
        assert took.num_pulled_blocks == PREFIX_BLOCKS + 1


async def test_branches_are_taken_in_behind_their_trunk() -> None:
    async with taking() as (pool, source, taker):
        await pool.pair("prefill-0", "decode-0").generate(prompt(2, max_tokens=1))
        chains = await hot(source)
        took = await pull(taker, where(source), chains)
        assert [chain.trunk for chain in chains] == [0, 1]
        assert (took.num_pulled_blocks, took.num_left_blocks) == (PREFIX_BLOCKS + 2, 0)
        assert {block for chain in await hot(taker) for block in blocks(chain)} == {
            block for chain in chains for block in blocks(chain)
        }


async def test_pull_from_an_earlier_life_of_the_source_raises_stale_epoch() -> None:
    async with taking() as (_pool, source, taker):
        with pytest.raises(StaleEpoch):
            await pull(taker, where(source, epoch=source.runtime.epoch + 1), await hot(source))


GOOD: dict[str, Any] = {"block_hashes": bytes(32), "values": [1.0, 0.5], "num_reused_blocks": 1}
BAD_CHAINS: dict[str, list[dict[str, Any]]] = {
    "chains[0].block_hashes": [GOOD | {"block_hashes": bytes(31)}],
    "chains[1].block_hashes": [GOOD, GOOD | {"block_hashes": b""}],
    "chains[0].values": [GOOD | {"values": [1.0]}],
    "chains[1].values": [GOOD, GOOD | {"values": [0.5, 1.0]}],
    "chains[2].values": [GOOD, GOOD, GOOD | {"values": [float("nan"), float("nan")]}],
    "chains[0].num_reused_blocks": [GOOD | {"num_reused_blocks": 3}],
    "chains[0].trunk": [GOOD | {"trunk": 1, "num_shared_blocks": 1}],
    "chains[1].num_shared_blocks": [GOOD, GOOD | {"trunk": 1, "num_shared_blocks": 3}],
    "chains[0].num_shared_blocks": [GOOD | {"num_shared_blocks": 1}],
    "chains": [GOOD | {"block_hashes": bytes(16 * 65537), "values": [1.0] * 65537}],
}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        *(
            (field, {"chains": [prefix_pb2.PrefixChain(**chain) for chain in chains]})
            for field, chains in BAD_CHAINS.items()
        ),
        ("source.worker_id", {"worker_id": ""}),
        ("source.worker_id", {"worker_id": "prefill-0"}),
        ("source.address", {"address": ""}),
        ("source.epoch", {"epoch": 0}),
        ("time_limit_s", {"time_limit_s": 0.0}),
        ("time_limit_s", {"time_limit_s": float("nan")}),
        ("max_bytes", {"max_bytes": 0}),
    ],
)
async def test_pull_with_a_bad_value_is_refused_by_field_and_nothing_is_held(
    field: str, changes: dict[str, Any]
) -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        error = await refusal(pool, **changes)
        assert isinstance(error, InvalidRequest)
        assert error.field == field


async def test_pull_from_an_unknown_source_raises_worker_lost_and_nothing_is_held() -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        error = await refusal(pool, address="127.0.0.1:1")
        assert isinstance(error, WorkerLost)


async def refusal(
    pool: Pool, *, chains: Sequence[prefix_pb2.PrefixChain] | None = None, **changes: Any
) -> KvrelayError:
    """Ask prefill-0 to pull from a worker that does not exist, and return what it says."""
    source: dict[str, Any] = {"worker_id": "prefill-9", "address": "127.0.0.1:1", "epoch": 1}
    bounds: dict[str, Any] = {"time_limit_s": 60.0, "max_bytes": MIB}
    asked = bounds | {name: value for name, value in changes.items() if name in bounds}
    named = source | {name: value for name, value in changes.items() if name in source}
    with pytest.raises(KvrelayError) as caught:
        await pull(
            pool.workers["prefill-0"],
            sequence_pb2.KvSource(**named),
            [prefix_pb2.PrefixChain(**GOOD)] if chains is None else chains,
            **asked,
        )
    return caught.value


def blocks(chain: prefix_pb2.PrefixChain) -> list[bytes]:
    return [chain.block_hashes[i : i + 16] for i in range(0, len(chain.block_hashes), 16)]


async def test_leaving_worker_waits_for_pulls_of_which_it_sees_pieces_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with warm_pool() as pool:
        worker = pool.workers["prefill-0"]
        num_pauses = 0

        async def sleep(_seconds: float) -> None:
            nonlocal num_pauses
            num_pauses += 1
            if num_pauses < 4:
                await hot(worker)  # begins and ends within the pause

        with monkeypatch.context() as patched:
            patched.setattr("worker.serving.asyncio", SimpleNamespace(sleep=sleep))
            await _until_quiet(worker.runtime)
        assert num_pauses == 4
