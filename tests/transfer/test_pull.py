"""The puller against a peer that lies, breaks off or is another one: it never reports a transfer as complete."""

import asyncio
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from common.block_hash import BlockHashes
from common.errors import HandoffGone, KvIncomplete, WorkerLost
from common.ids import BlockId, Epoch, HashRoot
from common.rpc import abort
from engine.device.shared_memory import allocate_region
from engine.fake_pages import FakeKvStore
from kv_transfer.pull import PullPlan
from kv_transfer.wanted import WantedBlocks
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.transfer.scripted_peer import BLOCK, OPENED, Peer, chunk, manifest, plan, pulling
from tests.trust import as_worker

GOOD = [OPENED, chunk(0), chunk(1, data=BLOCK[:8]), chunk(1, offset=8, data=BLOCK[8:]), manifest()]
LIES: dict[str, list[pb.FetchBlocksResponse]] = {
    "a block is missing": [OPENED, chunk(0), manifest()],
    "a piece is missing": [OPENED, chunk(0), chunk(1, data=BLOCK[:8]), manifest()],
    "a checksum is wrong": [OPENED, chunk(0, checksum=1), chunk(1), manifest()],
    "a block comes twice": [OPENED, chunk(0), chunk(0), chunk(1), manifest()],
    "a block was not asked for": [OPENED, chunk(0), chunk(1), chunk(2), manifest()],
    "a piece is too long": [OPENED, chunk(0, data=BLOCK + b"x"), chunk(1), manifest()],
    "pieces are out of order": [OPENED, chunk(0, offset=8, data=BLOCK[8:]), chunk(1), manifest()],
    "the manifest counts other tokens": [OPENED, chunk(0), chunk(1), manifest(num_tokens=7)],
    "the manifest counts other blocks": [OPENED, chunk(0), chunk(1), manifest(num_blocks=3)],
    "the manifest ends in another hash": [OPENED, chunk(0), chunk(1), manifest(last_block_hash=b"x" * 16)],
    "the manifest has no first token": [OPENED, chunk(0), chunk(1), manifest(first_tokens=[])],
    "the first token is another sample's": [
        OPENED,
        chunk(0),
        chunk(1),
        manifest(first_tokens=[pb.ManifestToken(sample_index=1, token_id=7)]),
    ],
    "there is no manifest": [OPENED, chunk(0), chunk(1)],
    "sealed blocks without shared memory": [
        OPENED,
        pb.FetchBlocksResponse(sealed=pb.SealedBlocks(first_block=0, block_ids=[0, 1], checksums=[1, 2])),
    ],
    "shared memory of no process": [
        pb.FetchBlocksResponse(
            opened=pb.FetchOpened(
                transport=worker_pb2.KV_TRANSPORT_SHM,
                shared_memory=pb.SharedMemory(pid=1 << 30, fd=3, size_bytes=64, nonce=b"n" * 16, num_blocks=1),
            )
        )
    ],
}
HASHES = BlockHashes(b"a" * 16 + b"b" * 16 + b"c" * 16)


def blocks_plan() -> PullPlan:
    """Return a plan for three cached blocks, the first of which is here already."""
    table = (BlockId(1), BlockId(5), BlockId(2))
    return plan(wanted=WantedBlocks(hashes=HASHES, block_size=4), block_table=table, first_block=1)


def pages(store: FakeKvStore) -> list[bytes]:
    return [bytes(store.read_blocks([BlockId(i)])) for i in range(8)]


async def test_pull_of_shared_pages_that_are_not_there_raises_kv_incomplete() -> None:
    source = FakeKvStore(num_blocks=4, block_size=4)
    region = source.shared_region
    assert region is not None

    def opened(num_blocks: int) -> pb.FetchBlocksResponse:
        shared = pb.SharedMemory(
            pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce, num_blocks=num_blocks
        )
        return pb.FetchBlocksResponse(
            opened=pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_SHM, shared_memory=shared)
        )

    bad_page = pb.FetchBlocksResponse(sealed=pb.SealedBlocks(block_ids=[0, 4], checksums=[1, 2]))
    no_page = pb.FetchBlocksResponse(sealed=pb.SealedBlocks())
    for script in ([opened(5)], [opened(4), bad_page, manifest()], [opened(4), no_page, manifest()]):
        async with pulling(Peer(script)) as (puller, _store, channel):
            with pytest.raises(KvIncomplete):
                await puller.pull(plan(), channel)


async def test_chunks_beside_shared_pages_are_taken_only_where_they_were_asked_for() -> None:
    source = FakeKvStore(num_blocks=4, block_size=4)
    region = source.shared_region
    assert region is not None
    shared = pb.SharedMemory(
        pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce, num_blocks=4
    )
    opened = pb.FetchBlocksResponse(opened=pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_SHM, shared_memory=shared))
    script = [opened, chunk(1), chunk(2), blocks_manifest(3)]
    async with pulling(Peer(script)) as (puller, store, channel):
        await puller.pull(replace(blocks_plan(), wanted=WITH_ROOT), channel)
        assert pages(store)[5] == pages(store)[2] == BLOCK
    async with pulling(Peer(script)) as (puller, _store, channel):
        with pytest.raises(KvIncomplete, match="unexpected chunk"):
            await puller.pull(blocks_plan(), channel)


STAGED_LIES: dict[str, dict[str, Any]] = {
    "a checksum is wrong": {"checksums": [1, 2]},
    "a checksum is missing": {"checksums": []},
    "places have a hole": {"block_ids": [0, 2]},
    "a place is outside": {"block_ids": [3, 4]},
    "there are no places": {"block_ids": [], "checksums": []},
    "a block was not asked for": {"first_block": 2},
}


def staged(**changes: Any) -> pb.FetchBlocksResponse:
    fields: dict[str, Any] = {"first_block": 1, "block_ids": [0, 1], "checksums": [xxhash.xxh3_64_intdigest(BLOCK)] * 2}
    return pb.FetchBlocksResponse(staged=pb.SealedBlocks(**(fields | changes)))


@contextmanager
def buffers(**changes: Any) -> Iterator[pb.FetchBlocksResponse]:
    """Share four buffers of a block, and yield the message that names them beside gRPC."""
    memory, region = allocate_region(4 * len(BLOCK))
    assert region is not None
    memory[: 2 * len(BLOCK)] = 2 * BLOCK
    fields: dict[str, Any] = {"pid": os.getpid(), "fd": region.fd, "size_bytes": region.size_bytes, "num_blocks": 4}
    shared = pb.SharedMemory(**(fields | {"nonce": region.nonce} | changes))
    yield pb.FetchBlocksResponse(opened=pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_GRPC, offloaded_memory=shared))
    memory.close()


WITH_ROOT = WantedBlocks(hashes=HASHES, block_size=4, root=HashRoot(b"r" * 32))


async def test_staged_blocks_are_copied_out_of_the_buffers_of_a_peer() -> None:
    with buffers() as opened:
        async with pulling(Peer([opened, staged(), blocks_manifest(3)])) as (puller, store, channel):
            await puller.pull(replace(blocks_plan(), wanted=WITH_ROOT), channel)
            assert pages(store)[5] == pages(store)[2] == BLOCK


@pytest.mark.parametrize("lie", STAGED_LIES)
async def test_a_lie_about_staged_blocks_ends_the_pull(lie: str) -> None:
    with buffers() as opened:
        script = [opened, staged(**STAGED_LIES[lie]), blocks_manifest(3)]
        async with pulling(Peer(script)) as (puller, _store, channel):
            with pytest.raises(KvIncomplete):
                await puller.pull(replace(blocks_plan(), wanted=WITH_ROOT), channel)


async def test_staged_blocks_that_were_not_asked_for_end_the_pull() -> None:
    with buffers() as opened:
        async with pulling(Peer([opened, staged(), blocks_manifest(3)])) as (puller, _store, channel):
            with pytest.raises(KvIncomplete, match="unexpected staged"):
                await puller.pull(blocks_plan(), channel)


@pytest.mark.parametrize("changes", [{"nonce": b"n" * 16}, {"num_blocks": 5}, {"pid": 1 << 30}])
async def test_buffers_that_cannot_be_mapped_are_not_asked_for_again(changes: dict[str, Any]) -> None:
    with buffers(**changes) as opened:
        peer = Peer([opened, staged(), blocks_manifest(3)])
        async with pulling(peer) as (puller, _store, channel):
            for _ in range(2):
                with pytest.raises(KvIncomplete, match="cannot be mapped"):
                    await puller.pull(replace(blocks_plan(), wanted=WITH_ROOT), channel)
        first, second = peer.offered
        assert worker_pb2.KV_TRANSPORT_SHM in first
        assert worker_pb2.KV_TRANSPORT_SHM not in second


def blocks_manifest(num_held: int, **changes: Any) -> pb.FetchBlocksResponse:
    last_hash = HASHES[num_held - 1] if num_held else b""
    fields = {"num_tokens": 4 * num_held, "num_blocks": num_held, "last_block_hash": last_hash, "first_tokens": []}
    return manifest(**(fields | changes))


BLOCK_LIES: dict[str, list[pb.FetchBlocksResponse]] = {
    "a block is missing": [OPENED, chunk(1), blocks_manifest(3)],
    "a block has a hole before it": [OPENED, chunk(2), blocks_manifest(3)],
    "a checksum is wrong": [OPENED, chunk(1, checksum=1), blocks_manifest(2)],
    "a block was not asked for": [OPENED, chunk(0), chunk(1), blocks_manifest(2)],
    "the manifest counts more blocks than were asked for": [
        OPENED,
        chunk(1),
        chunk(2),
        blocks_manifest(3, num_blocks=4, num_tokens=16),
    ],
    "the manifest counts other tokens": [OPENED, chunk(1), blocks_manifest(2, num_tokens=9)],
    "the manifest ends in another hash": [OPENED, chunk(1), blocks_manifest(2, last_block_hash=HASHES[2])],
    "the manifest has a first token": [OPENED, chunk(1), blocks_manifest(2, first_tokens=[pb.ManifestToken()])],
    "the manifest has a part of a token": [OPENED, chunk(1), blocks_manifest(2, tokens=bytes(31))],
    "the manifest has the tokens of other blocks": [
        OPENED,
        chunk(1),
        blocks_manifest(2, tokens=bytes(32), hash_root=bytes(32)),
    ],
    "there is no manifest": [OPENED, chunk(1), chunk(2)],
}


@pytest.mark.parametrize("wait_s", [0.0, 1e9, -1e9, math.nan])
async def test_a_link_is_not_measured_by_the_time_of_its_sources_tiers(wait_s: float) -> None:
    script = [OPENED, chunk(1), chunk(2), blocks_manifest(3, offloaded_wait_s=wait_s)]
    took_s: list[float] = []
    async with pulling(Peer(script)) as (puller, _store, channel):
        puller._on_pull = lambda _peer, _transport, _num_bytes, seconds: took_s.append(seconds)  # noqa: SLF001
        await puller.pull(blocks_plan(), channel)
    (seconds,) = took_s
    assert (seconds == 0.0) is (wait_s == 1e9)
    assert 0 <= seconds < 60


@pytest.mark.parametrize("num_held", [0, 1, 2, 3])
async def test_pull_of_cached_blocks_takes_as_many_as_the_source_holds_and_acknowledges(num_held: int) -> None:
    peer = Peer([OPENED, *(chunk(i) for i in range(1, num_held)), blocks_manifest(num_held)])
    async with pulling(peer) as (puller, store, channel):
        before = pages(store)
        pulled = await puller.pull(blocks_plan(), channel)
        after = pages(store)
    num_received = max(0, num_held - 1)
    assert (pulled.num_blocks, pulled.manifest.num_blocks) == (num_received, num_held)
    changed = {5, 2} if num_received == 2 else {5} if num_received else set()
    assert {i for i in range(8) if before[i] != after[i]} == changed
    assert peer.acked


async def test_pull_of_a_complete_transfer_writes_only_its_own_pages_and_acknowledges() -> None:
    peer = Peer(GOOD)
    async with pulling(peer) as (puller, store, channel):
        before = pages(store)
        pulled = await puller.pull(plan(), channel)
        after = pages(store)
    assert (pulled.num_blocks, pulled.kv_bytes) == (2, 64)
    assert after[5] == after[2] == BLOCK
    assert {i for i in range(8) if before[i] != after[i]} == {5, 2}
    assert peer.acked


@pytest.mark.parametrize(
    ("wanted", "script"),
    [
        *(pytest.param(plan(), script, id=f"handoff: {lie}") for lie, script in LIES.items()),
        *(pytest.param(blocks_plan(), script, id=f"cached: {lie}") for lie, script in BLOCK_LIES.items()),
    ],
)
async def test_pull_of_a_wrong_transfer_raises_kv_incomplete_and_never_acknowledges(
    wanted: PullPlan, script: list[pb.FetchBlocksResponse]
) -> None:
    peer = Peer(script)
    async with pulling(peer) as (puller, _store, channel):
        with pytest.raises(KvIncomplete) as raised:
            await puller.pull(wanted, channel)
    assert not peer.acked
    assert not any(block_hash.decode() in raised.value.message for block_hash in HASHES)


async def test_pull_when_peer_aborts_raises_what_the_peer_said() -> None:
    async def end(context: Any) -> None:
        await abort(context, HandoffGone("the prefill was cancelled"))

    async with pulling(Peer([OPENED, chunk(0)], end)) as (puller, _store, channel):
        with pytest.raises(HandoffGone, match="the prefill was cancelled"):
            await puller.pull(plan(), channel)


async def test_pull_after_a_failed_mapping_offers_this_life_of_the_peer_grpc_only() -> None:
    peer = Peer(LIES["shared memory of no process"])
    async with pulling(peer) as (puller, _store, channel):
        with pytest.raises(KvIncomplete):
            await puller.pull(plan(), channel)
        peer.script = GOOD
        await puller.pull(plan(), channel)
        await puller.pull(plan(epoch=Epoch(2)), channel)
    both = [worker_pb2.KV_TRANSPORT_SHM, worker_pb2.KV_TRANSPORT_GRPC]
    assert peer.offered == [both, [worker_pb2.KV_TRANSPORT_GRPC], both]


async def test_pull_when_its_channel_is_closed_raises_worker_lost() -> None:
    reached = asyncio.Event()

    async def end(_context: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with pulling(Peer([OPENED, chunk(0)], end)) as (puller, _store, channel):
        pull = asyncio.ensure_future(puller.pull(plan(), channel))
        await reached.wait()
        await channel.close()
        with pytest.raises(WorkerLost):
            await pull


async def test_pull_cancelled_twice_ends_only_after_the_write_into_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, writing, may_end, ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), threading.Event()

    def slow_write(_self: FakeKvStore, _block_ids: Any, _data: memoryview) -> None:
        loop.call_soon_threadsafe(writing.set)
        assert may_end.wait(60)
        ended.set()

    monkeypatch.setattr(FakeKvStore, "write_blocks", slow_write)
    async with pulling(Peer(GOOD)) as (puller, _store, channel):
        pull = asyncio.ensure_future(puller.pull(plan(), channel))
        await writing.wait()
        for _ in range(2):
            pull.cancel()
            await asyncio.wait([pull], timeout=0.02)
        assert not pull.done(), "the pages may be freed as soon as the pull has ended"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert ended.is_set()


async def test_pull_from_an_address_without_a_worker_raises_worker_lost() -> None:
    async with pulling(Peer(GOOD)) as (puller, _store, _channel):
        nowhere = as_worker("127.0.0.1:1", "decode-0")
        with pytest.raises(WorkerLost):
            await puller.pull(plan(), nowhere)
        await nowhere.close()


@pytest.mark.parametrize("transport", [worker_pb2.KV_TRANSPORT_UNSPECIFIED, worker_pb2.KV_TRANSPORT_CUDA_IPC, 77])
async def test_pull_by_a_transport_that_was_not_offered_fails_and_maps_nothing(transport: Any) -> None:
    peer = Peer([pb.FetchBlocksResponse(opened=pb.FetchOpened(transport=transport)), *GOOD[1:]])
    async with pulling(peer) as (puller, _store, channel):
        with pytest.raises(KvIncomplete, match="not offered"):
            await puller.pull(plan(), channel)


async def test_pull_whose_peer_sends_blocks_before_it_says_how_fails() -> None:
    async with pulling(Peer(GOOD[1:])) as (puller, _store, channel):
        with pytest.raises(KvIncomplete, match="unexpected"):
            await puller.pull(plan(), channel)
