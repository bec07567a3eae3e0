"""Sharing pages on a card, over a driver that shares memory within this process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from common.errors import LayoutMismatch, TransferError
from common.ids import BlockId
from engine.cuda.ipc import SharedDevicePages, share_pages
from tests.engine.cuda_kv.support import Card, CardDriver, make_shape, make_storage, pages_in, wire_bytes

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


def test_share_pages_when_they_are_in_host_memory_shares_nothing() -> None:
    storage = make_storage(SHAPE, 2).cpu()
    assert share_pages(storage, pages_in(storage, SHAPE)) is None
