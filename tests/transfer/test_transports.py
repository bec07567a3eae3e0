"""The seam between transfers and transports, and the places that list all transports."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.config import TransferConfig
from common.ids import BlockId
from common.wire_names import TRANSPORT_NAMES, TRANSPORT_NUMBERS
from engine.kv_store import KvStore
from kv_transfer.transports.registry import TRANSPORTS
from kv_transfer.transports.transport import (
    PeerLife,
    PeerMemoryUnreachable,
    PullTarget,
    SealedReceiver,
    Transport,
    sealed,
)
from kvrelay.v1 import kv_transfer_pb2 as pb
from tests.builders import make_request
from tests.worker.cluster import running_pair

_NUMBER = 77
_DOCS = Path(__file__).parents[2] / "docs"


class InMemory(Transport):
    """Moves blocks between the workers of one process."""

    name = "memory"
    payload = "sealed"
    reads_pages = False
    stores: dict[bytes, KvStore]
    """Pages of every worker that serves."""

    def describe(self, opened: pb.FetchOpened) -> None:
        opened.shared_memory.nonce = str(id(self._store)).encode()
        self.stores[opened.shared_memory.nonce] = self._store

    def seal(self, first_block: int, block_ids: Sequence[BlockId]) -> list[pb.FetchBlocksResponse]:
        return [sealed(first_block, block_ids)]

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> "AsyncIterator[_Copier]":
        source = self.stores.pop(opened.shared_memory.nonce, None)
        if source is None:
            raise PeerMemoryUnreachable("no such store")
        yield _Copier(source, self._store, target)


class _Copier(SealedReceiver):
    def __init__(self, source: KvStore, own: KvStore, target: PullTarget) -> None:
        super().__init__(target)
        self._source = source
        self._own = own

    def copy(self, blocks: pb.SealedBlocks, pages: Sequence[BlockId]) -> None:
        self._own.write_blocks(pages, self._source.read_blocks([BlockId(i) for i in blocks.block_ids]))


async def test_transport_that_is_registered_carries_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, InMemory.name, InMemory)
    monkeypatch.setattr(InMemory, "stores", {}, raising=False)
    monkeypatch.setitem(TRANSPORT_NUMBERS, InMemory.name, _NUMBER)
    async with running_pair(transports=[InMemory.name]) as pair:
        for length in (1, 4, 30):
            request = make_request([length] * length, max_tokens=9, ignore_eos=True)
            answer = await pair.generate(request)
            assert answer.transfer is not None
            assert (answer.transfer.transport, answer.transfer.num_blocks) == (_NUMBER, -(-length // 4))


def test_registry_and_wire_know_the_same_transports_default_is_fastest_first() -> None:
    assert sorted(TRANSPORTS) == sorted(TRANSPORT_NAMES.values())
    default = TransferConfig().transports
    assert [name for name in TRANSPORTS if name in default] == list(default)
    assert default[-1] == "grpc", "it reaches everywhere"


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("serving.md", r"^\| `transfer\.transports` \| `\[.*\]` \| `workers` \|(.*)\|$"),
        ("glossary.md", r"^\| \*\*transport\*\* \|(.*)\|$"),
        ("metrics.md", r"^\| `kvrelay_kv_transfer_bytes_total` .* by transport:(.*)\|$"),
    ],
)
def test_docs_list_every_transport_in_order_of_preference(page: str, row: str) -> None:
    found = re.search(row, (_DOCS / page).read_text("utf-8"), re.MULTILINE)
    assert found is not None
    assert re.findall(r"`(\w+)`", found[1]) == list(TRANSPORTS)
