"""Handoffs through the memory of one card: chosen where it reaches, verified, and unmapped afterwards."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from common.config import TransferConfig
from common.errors import HandoffGone, KvIncomplete, KvrelayError
from common.ids import BlockId, Epoch, WorkerId
from common.rpc import abort
from engine.fake_pages import FakeKvStore
from kv_transfer.pull import Pulled
from kv_transfer.transports.cuda_ipc import CudaIpc
from kv_transfer.transports.grpc_chunks import GrpcChunks
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.transports.transport import PeerLife, PullTarget
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.transfer.device_sharing import Card, FakeSharing, put_on_card
from tests.transfer.scripted_peer import BLOCK, Peer, manifest, plan, pulling
from tests.worker.calls import Answer
from tests.worker.cluster import running_pair

PEER, NEXT_LIFE = (PeerLife(WorkerId("prefill-0"), Epoch(epoch)) for epoch in (1, 2))
EVERY = ("cuda_ipc", "shm", "grpc")
LENGTHS = sorted({1, *(BLOCK_SIZE * k + d for k in (1, 8) for d in (-1, 0, 1)), 200})


def transport_of(answer: Answer) -> int:
    assert answer.transfer is not None
    return answer.transfer.transport


def opened_by(sharing: FakeSharing, **changes: object) -> pb.FetchOpened:
    """Return what a peer says of its device memory."""
    region = sharing.region
    memory = pb.DeviceMemory(
        handle=region.handle,
        offset_bytes=region.offset_bytes,
        region_bytes=region.size_bytes,
        device_uuid=region.device_uuid,
        nonce=region.nonce,
        num_blocks=sharing.store.num_blocks,
    )
    memory.MergeFrom(pb.DeviceMemory(**changes))  # type: ignore[arg-type]
    return pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_CUDA_IPC, device_memory=memory)


def make_sharing(card: Card, *, num_blocks: int = 8) -> FakeSharing:
    store = FakeKvStore(num_blocks=num_blocks, block_size=4)
    sharing = FakeSharing(card, store)
    store.device_sharing = sharing
    return sharing


class Puller:
    """Pulls from peers by CUDA IPC, or by gRPC."""

    def __init__(self, sharing: FakeSharing) -> None:
        config = TransferConfig(chunk_bytes=4096)
        self.transports = WorkerTransports([CudaIpc(sharing.store, config), GrpcChunks(sharing.store, config)])

    def offers(self, peer: PeerLife = PEER) -> list[str]:
        return [transport.name for transport in self.transports.offer(peer, pb.OpenFetch())]

    def mapped(self, opened: pb.FetchOpened, peer: PeerLife = PEER) -> AbstractAsyncContextManager[object]:
        offered = self.transports.offer(peer, pb.OpenFetch())
        return self.transports.fetch(peer, offered, opened, PullTarget((), set()))


async def test_handoff_on_one_card_equals_oracle_at_every_boundary_and_maps_the_peer_once() -> None:
    card = Card()
    async with running_pair(transports=EVERY) as pair:
        put_on_card(pair.prefill, card)
        put_on_card(pair.decode, card)
        for length in LENGTHS:
            answer = await pair.generate(make_request(range(length), max_tokens=9, ignore_eos=True))
            assert transport_of(answer) == worker_pb2.KV_TRANSPORT_CUDA_IPC
    assert card.num_mapped == 1


async def test_handoff_between_two_cards_is_mapped_where_one_reads_the_other() -> None:
    source = Card("card-0")
    card = Card("card-1", readable=(source,))
    async with running_pair(transports=EVERY) as pair:
        put_on_card(pair.prefill, source)
        put_on_card(pair.decode, card)
        for length in LENGTHS:
            answer = await pair.generate(make_request(range(length), max_tokens=9, ignore_eos=True))
            assert transport_of(answer) == worker_pb2.KV_TRANSPORT_CUDA_IPC
    assert card.num_mapped == 1


async def test_card_that_is_readable_but_cannot_be_mapped_sends_by_the_ring_next() -> None:
    source = Card("card-0")
    async with running_pair(transports=EVERY) as pair:
        put_on_card(pair.prefill, source)
        put_on_card(pair.decode, Card("card-1", readable=(source,)))
        source.stores.clear()  # the driver knows the card, and not the handle
        with pytest.raises(KvrelayError):
            await pair.generate(make_request(range(30), ignore_eos=True))
        answer = await pair.generate(make_request(range(30), ignore_eos=True))
    assert transport_of(answer) == worker_pb2.KV_TRANSPORT_SHM


@pytest.mark.parametrize(
    ("apart", "transport"),
    [
        ("two cards of one host", worker_pb2.KV_TRANSPORT_SHM),
        ("card and host memory", worker_pb2.KV_TRANSPORT_SHM),
        ("two hosts whose cards look alike", worker_pb2.KV_TRANSPORT_GRPC),
    ],
)
async def test_handoff_between_two_memories_goes_by_the_ring_of_its_host_or_by_grpc(
    apart: str, transport: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card("card-0")
    async with running_pair(transports=EVERY) as pair:
        put_on_card(pair.prefill, card)
        put_on_card(pair.decode, Card("card-1") if apart == "two cards of one host" else card)
        if apart == "two hosts whose cards look alike":
            monkeypatch.setattr("kv_transfer.pull.host_id", lambda: "another host")
        elif apart == "card and host memory":
            pair.decode.runtime.executor.kv.device_sharing = None
        for length in LENGTHS:
            answer = await pair.generate(make_request(range(length), max_tokens=9, ignore_eos=True))
            assert transport_of(answer) == transport


def sealed_by(*block_ids: int) -> pb.FetchBlocksResponse:
    return pb.FetchBlocksResponse(sealed=pb.SealedBlocks(first_block=0, block_ids=block_ids))


@asynccontextmanager
async def pulling_on(card: Card, peer: Peer) -> AsyncIterator[tuple[FakeKvStore, Callable[[], Awaitable[Pulled]]]]:
    """Yield the puller's pages, on a card, and the pull."""
    async with pulling(peer) as (puller, store, channel):
        store.device_sharing = FakeSharing(card, store)
        yield store, lambda: puller.pull(plan(), channel)


async def test_pull_copies_the_named_pages_over_its_own() -> None:
    card = Card()
    peer_pages = make_sharing(card)
    peer_pages.store.write_blocks([BlockId(3), BlockId(1)], memoryview(BLOCK + BLOCK[::-1]))
    peer = Peer([pb.FetchBlocksResponse(opened=opened_by(peer_pages)), sealed_by(3, 1), manifest()])
    async with pulling_on(card, peer) as (store, pull):
        pulled = await pull()
    assert pulled.transport == worker_pb2.KV_TRANSPORT_CUDA_IPC
    assert bytes(store.read_blocks(plan().block_table)) == BLOCK + BLOCK[::-1]
    assert peer.acked


async def test_pull_whose_pages_are_unpinned_before_its_acknowledgement_fails() -> None:
    card = Card()

    async def expire(context: object) -> None:
        await abort(context, HandoffGone("the puller did not acknowledge the manifest"))  # type: ignore[arg-type]

    opened = pb.FetchBlocksResponse(opened=opened_by(make_sharing(card)))
    async with pulling_on(card, Peer([opened, sealed_by(3, 1), manifest()], expire)) as (_store, pull):
        with pytest.raises(KvrelayError):
            await pull()


@pytest.mark.parametrize("block_ids", [[3], [3, 8]])
async def test_pull_of_blocks_that_the_peer_cannot_have_raises_kv_incomplete(block_ids: list[int]) -> None:
    card = Card()
    peer = Peer([pb.FetchBlocksResponse(opened=opened_by(make_sharing(card))), sealed_by(*block_ids), manifest()])
    async with pulling_on(card, peer) as (_store, pull):
        with pytest.raises(KvIncomplete):
            await pull()
    assert not peer.acked


async def test_failed_mapping_is_remembered_for_that_life_of_that_peer_only() -> None:
    puller = Puller(make_sharing(Card()))
    with pytest.raises(KvIncomplete, match="cannot be mapped"):
        async with puller.mapped(opened_by(make_sharing(Card()), handle=b"unknown")):
            raise AssertionError("there is nothing to copy from")
    assert puller.offers() == ["grpc"]
    assert puller.offers(NEXT_LIFE) == puller.offers(PeerLife(WorkerId("prefill-1"), Epoch(1))) == ["cuda_ipc", "grpc"]


async def test_pulls_share_a_mapping_until_the_connection_has_ended_and_they_with_it() -> None:
    card = Card()
    puller, opened = Puller(make_sharing(card)), opened_by(make_sharing(card))
    for _ in range(2):
        async with puller.mapped(opened), puller.mapped(opened):
            assert (card.num_mapped, card.num_closed) == (1, 0)
    async with AsyncExitStack() as pulls:
        for _ in range(2):
            await pulls.enter_async_context(puller.mapped(opened))
        puller.transports.forget(PEER)
        assert card.num_closed == 0
        async with puller.mapped(opened):
            assert card.num_mapped == 2
    async with asyncio.timeout(60):
        await card.closed.wait()
    assert (card.num_mapped, card.num_closed) == (2, 1)


async def test_memory_of_a_peer_whose_connection_breaks_is_unmapped_at_once() -> None:
    card = Card()
    async with running_pair(transports=EVERY, ends_empty=False) as pair:
        put_on_card(pair.prefill, card)
        put_on_card(pair.decode, card)
        for begin in (0, 100):
            await pair.generate(make_request(range(begin, begin + 30), ignore_eos=True))
        assert (card.num_mapped, card.num_closed) == (1, 0)
        await pair.prefill.stop(0)
        async with asyncio.timeout(60):
            await card.closed.wait()


async def test_pull_from_a_restarted_peer_maps_its_new_memory() -> None:
    card = Card()
    puller = Puller(make_sharing(card))
    for num_lives, peer in enumerate((PEER, NEXT_LIFE), start=1):
        async with puller.mapped(opened_by(make_sharing(card)), peer):
            assert card.num_mapped == num_lives


async def test_pull_cancelled_while_mapping_leaves_a_mapping_that_can_be_closed() -> None:
    card = Card()
    puller, opened = Puller(make_sharing(card)), opened_by(make_sharing(card))

    async def pull() -> None:
        async with puller.mapped(opened):
            raise AssertionError("the pull goes on")

    cancelled = asyncio.ensure_future(pull())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    puller.transports.forget(PEER)
    async with asyncio.timeout(60):
        await card.closed.wait()
    assert (card.num_mapped, card.num_closed) == (1, 1)
