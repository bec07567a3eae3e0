"""Copies between pages, and pages that processes share on a card: the same bytes as plain indexing gives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from common.errors import LayoutMismatch, TransferError
from common.ids import BlockId
from engine.device.ipc import SharedDevicePages, share_pages
from engine.device.kv_copy import DevicePages
from engine.kv_store import KvShape
from engine.pages.kv_cache import HostPages
from tests.engine.cuda_kv.support import Card, CardDriver, make_shape, make_storage, pages_in, wire_bytes

Open = Callable[..., tuple[Tensor, HostPages | DevicePages]]
# Parts of 8-byte words, then of 4-, 2- and 1-byte words.
SHAPES = [
    make_shape(),
    make_shape(dtype="float8_e4m3fn", head_dim=16),
    make_shape(dtype="float32", head_dim=3, num_kv_heads=1, block_size=1),
    make_shape(dtype="float16", head_dim=3, num_kv_heads=1, block_size=1),
    make_shape(dtype="float8_e4m3fn", head_dim=5, num_kv_heads=1, block_size=1),
    make_shape(head_dim=9, num_kv_heads=1, parts_per_layer=1),
]


@pytest.fixture(params=["host", "device"])
def opens(request: pytest.FixtureRequest) -> Open:
    """Return a function that opens pages with random bytes in host or in device memory."""

    def open_pages(shape: KvShape, num_blocks: int, seed: int = 0) -> tuple[Tensor, HostPages | DevicePages]:
        storage = make_storage(shape, num_blocks, seed=seed)
        if request.param == "device":
            return storage, pages_in(storage, shape)
        storage = storage.cpu()
        return storage, HostPages(storage.numpy().data, num_blocks, shape, num_pieces=1)

    return open_pages


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.dtype}-{shape.block_bytes}")
@pytest.mark.parametrize("block_ids", [[], [4], [6, 0, 3], [5, 1, 0, 6, 2, 4, 3]])
def test_read_blocks_when_order_is_scrambled_equals_plain_indexing(
    opens: Open, shape: KvShape, block_ids: list[int]
) -> None:
    storage, pages = opens(shape, 7)
    data = pages.read_blocks(block_ids)
    assert data.nbytes == len(block_ids) * shape.block_bytes
    assert bytes(data) == wire_bytes(storage, shape, block_ids)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.dtype}-{shape.block_bytes}")
def test_write_blocks_when_given_another_engines_blocks_fills_those_pages_only(opens: Open, shape: KvShape) -> None:
    (source, reader), (target, writer) = opens(shape, 5, 1), opens(shape, 9, 2)
    before = target.clone()
    writer.write_blocks([8, 0, 5, 2], reader.read_blocks([3, 1, 0, 4]))
    assert wire_bytes(target, shape, [8, 0, 5, 2]) == wire_bytes(source, shape, [3, 1, 0, 4])
    untouched = [1, 3, 4, 6, 7]
    assert wire_bytes(target, shape, untouched) == wire_bytes(before, shape, untouched)


def test_read_blocks_when_pages_change_afterwards_keeps_the_copy(opens: Open) -> None:
    storage, pages = opens(make_shape(), 3)
    data = pages.read_blocks([1])
    before = bytes(data)
    storage.zero_()
    assert bytes(data) == before


@pytest.mark.parametrize("block_id", [-1, 7])
def test_copies_with_an_id_out_of_range_report_layout_mismatch_and_write_nothing(opens: Open, block_id: int) -> None:
    shape = make_shape()
    storage, pages = opens(shape, 7)
    before = storage.clone()
    with pytest.raises(LayoutMismatch, match=f"no block {block_id}"):
        pages.read_blocks([0, block_id])
    with pytest.raises(LayoutMismatch, match=f"no block {block_id}"):
        pages.write_blocks([0, block_id], memoryview(bytes(2 * shape.block_bytes)))
    if isinstance(pages, DevicePages):
        for sources, targets in (([block_id], [0]), ([0], [block_id])):
            with pytest.raises(LayoutMismatch, match=f"no block {block_id}"):
                pages.copy_blocks(pages.blocks, sources, targets)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("difference", [-1, 1])
def test_write_blocks_when_size_is_wrong_reports_layout_mismatch_and_writes_nothing(
    opens: Open, difference: int
) -> None:
    shape = make_shape()
    storage, pages = opens(shape, 7)
    before = storage.clone()
    with pytest.raises(LayoutMismatch, match="2 blocks take"):
        pages.write_blocks([0, 1], memoryview(bytes(2 * shape.block_bytes + difference)))
    assert torch.equal(storage, before)


def test_copy_blocks_when_numbers_differ_reports_layout_mismatch() -> None:
    pages = pages_in(make_storage(make_shape(), 7), make_shape())
    with pytest.raises(LayoutMismatch, match="cannot be copied over"):
        pages.copy_blocks(pages.blocks, [0, 1], [2])


def test_copy_blocks_from_pages_of_another_pool_size_equals_plain_indexing() -> None:
    shape = make_shape()
    source, target = make_storage(shape, 4, seed=1), make_storage(shape, 6, seed=2)
    before = target.clone()
    own = pages_in(target, shape)
    own.copy_blocks(own.view_of(source[:-16]), [3, 0, 2], [1, 5, 0])
    assert wire_bytes(target, shape, [1, 5, 0]) == wire_bytes(source, shape, [3, 0, 2])
    assert wire_bytes(target, shape, [2, 3, 4]) == wire_bytes(before, shape, [2, 3, 4])


def test_copies_of_more_threads_than_lanes_do_not_mix_their_staging() -> None:
    shape = make_shape()
    source, target = make_storage(shape, 24, seed=1), make_storage(shape, 24, seed=2)
    reader, writer = pages_in(source, shape), pages_in(target, shape)

    def move(first: int) -> None:
        block_ids = list(range(first, 24, 6))
        for _ in range(20):
            writer.write_blocks(block_ids, reader.read_blocks(block_ids))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(move, range(6)))
    assert torch.equal(target[:-16], source[:-16])


SHAPE = make_shape()


class Process:
    """One process' pages on a card."""

    def __init__(self, card: Card, num_blocks: int, *, seed: int) -> None:
        self.storage = make_storage(SHAPE, num_blocks, seed=seed)
        self.num_blocks = num_blocks
        driver = CardDriver(card)
        driver.own(self.storage)
        self.shared = SharedDevicePages(self.storage, pages_in(self.storage, SHAPE), driver)


def two_processes() -> tuple[Card, Process, Process]:
    """Return a card, a peer with five blocks on it and ourselves with eight."""
    card = Card()
    return card, Process(card, 5, seed=1), Process(card, 8, seed=2)


def test_mapped_pages_when_copied_fill_ours_and_leave_the_peers_alone() -> None:
    _card, peer, own = two_processes()
    peers_before, ours_before = peer.storage.clone(), own.storage.clone()
    mapped = own.shared.map_peer(peer.shared.region, peer.num_blocks)
    mapped.copy_blocks([4, 0, 2], [BlockId(7), BlockId(1), BlockId(3)])
    assert wire_bytes(own.storage, SHAPE, [7, 1, 3]) == wire_bytes(peers_before, SHAPE, [4, 0, 2])
    assert wire_bytes(own.storage, SHAPE, [0, 2, 4, 5, 6]) == wire_bytes(ours_before, SHAPE, [0, 2, 4, 5, 6])
    assert torch.equal(peer.storage, peers_before)


def test_mapped_pages_when_closed_are_unmapped_once() -> None:
    card, peer, own = two_processes()
    mapped = own.shared.map_peer(peer.shared.region, peer.num_blocks)
    assert card.num_open == 1
    mapped.close()
    mapped.close()
    assert card.num_open == 0


@pytest.mark.parametrize("ids", [([5], [0]), ([0], [8]), ([-1], [0])])
def test_mapped_pages_when_an_id_is_outside_report_layout_mismatch(ids: tuple[list[int], list[int]]) -> None:
    _card, peer, own = two_processes()
    mapped = own.shared.map_peer(peer.shared.region, peer.num_blocks)
    with pytest.raises(LayoutMismatch, match="no block"):
        mapped.copy_blocks(ids[0], [BlockId(i) for i in ids[1]])


@pytest.mark.parametrize(
    ("changes", "num_blocks", "error", "reason"),
    [
        pytest.param({"device_uuid": "card-1"}, 5, LayoutMismatch, "card-1", id="another device"),
        pytest.param({}, 4, LayoutMismatch, "expected", id="too large for its blocks"),
        pytest.param({}, 6, LayoutMismatch, "expected", id="too small for its blocks"),
        pytest.param({"handle": b"gone"}, 5, TransferError, "CUDA_ERROR_INVALID_HANDLE", id="peer is dead"),
        pytest.param({"nonce": bytes(16)}, 5, TransferError, "not the peer's", id="other memory"),
    ],
)
def test_map_peer_when_the_region_is_wrong_is_refused_and_leaves_nothing_mapped(
    changes: dict[str, Any], num_blocks: int, error: type[Exception], reason: str
) -> None:
    card, peer, own = two_processes()
    with pytest.raises(error, match=reason):
        own.shared.map_peer(replace(peer.shared.region, **changes), num_blocks)
    assert card.num_open == 0


def test_pages_on_another_card_that_ours_reads_are_mapped_and_copied() -> None:
    card, peer, own = two_processes()
    driver = CardDriver(card, "card-1", reads=("card-0",))
    driver.own(own.storage)
    shared = SharedDevicePages(own.storage, pages_in(own.storage, SHAPE), driver)
    peers = peer.storage.clone()
    shared.map_peer(peer.shared.region, peer.num_blocks).copy_blocks([4, 0], [BlockId(7), BlockId(1)])
    assert wire_bytes(own.storage, SHAPE, [7, 1]) == wire_bytes(peers, SHAPE, [4, 0])


@pytest.mark.parametrize(("settings", "is_named"), [("expandable_segments:True", True), ("", False)])
def test_pages_that_expandable_segments_keep_from_being_shared_are_told_so(
    settings: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_device: torch.device) -> None:
        raise OSError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr("engine.device.driver.CudaDriver", refuse)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    storage = cast(torch.Tensor, SimpleNamespace(device=torch.device("cuda", 0)))
    assert share_pages(storage, cast(Any, None)) is None
    assert ("leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF" in caplog.text) is is_named


def test_share_pages_when_they_are_in_host_memory_shares_nothing() -> None:
    storage = make_storage(SHAPE, 2).cpu()
    assert share_pages(storage, pages_in(storage, SHAPE)) is None
