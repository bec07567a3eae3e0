"""Handoffs by NIXL, with a stand-in for it, and with itself where it is installed."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from common.config import TransferConfig
from common.errors import KvIncomplete
from common.ids import BlockId, Epoch, WorkerId
from engine.fake_pages import FakeKvStore, FakeWindow
from engine.kv_store import KvShape, WindowedLayers
from engine.pages.kv_cache import TorchKvStore
from engine.vllm.staging import StagedStore
from kv_transfer.transports.nixl import Nixl
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.transports.transport import PeerLife, PeerMemoryUnreachable, PullTarget, TransportUnusable
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.transfer.nixl_agent import Ending, Network
from tests.worker.cluster import running_pair

PEER = PeerLife(WorkerId("prefill-0"), Epoch(1))
LENGTHS = sorted({1, *(BLOCK_SIZE * k + d for k in (1, 8) for d in (-1, 0, 1)), 200})
IS_INSTALLED = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not IS_INSTALLED, reason="nixl is not installed here: `make test-vllm` has it")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Stands in for NIXL."""
    network = Network()
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    vars(api).update(nixl_agent=network.nixl_agent, nixl_agent_config=network.nixl_agent_config)
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return network


@pytest.fixture(params=["stand-in", pytest.param("real", marks=needs_nixl)])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with the stand-in, and with NIXL itself."""
    if request.param == "stand-in":
        request.getfixturevalue("network")
    yield


class Two:
    """A server and a puller with eight pages each, and one transfer between them."""

    def __init__(self, *, read_timeout_s: float = 5.0) -> None:
        self.source, self.own = (FakeKvStore(num_blocks=8, block_size=4) for _ in range(2))
        self.source.write_blocks([BlockId(i) for i in range(8)], memoryview(bytes(range(256))))
        self.server = Nixl(self.source, TransferConfig())
        self.puller = Nixl(self.own, TransferConfig(), read_timeout_s=read_timeout_s)
        self.target = PullTarget((BlockId(6), BlockId(1)), {0, 1})
        self.transports = WorkerTransports([self.puller])
        self.opened = pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_NIXL)
        self.server.describe(self.opened)

    def fetch(self) -> Any:
        offered = self.transports.offer(PEER, pb.OpenFetch())
        return self.transports.fetch(PEER, offered, self.opened, self.target)

    def pages(self) -> bytes:
        return bytes(self.own.read_blocks([BlockId(i) for i in range(8)]))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "window",
    [
        {},
        {"window": FakeWindow(num_tokens=10, num_pages=80)},
        {"window": FakeWindow(num_tokens=1, num_pages=80, is_state=True)},
    ],
    ids=["", "window", "state"],
)
async def test_handoff_by_nixl_equals_oracle_at_every_boundary(window: dict[str, FakeWindow]) -> None:
    async with running_pair(transports=["nixl"], prefill=window, decode=window) as pair:
        for length in LENGTHS:
            answer = await pair.generate(make_request(range(length), max_tokens=9, ignore_eos=True))
            assert answer.transfer is not None
            assert answer.transfer.transport == worker_pb2.KV_TRANSPORT_NIXL


@pytest.mark.usefixtures("either")
async def test_pages_of_several_pieces_arrive_in_their_own_places() -> None:
    shape = KvShape(
        num_layers=2, num_kv_heads=1, head_dim=12, block_size=8, dtype="bfloat16", row_bytes=24, fingerprint="vllm"
    )
    source, own = (StagedStore(shape, num_slots, page_order="any") for num_slots in (5, 7))
    data = bytes(i % 251 for i in range(3 * source.shape.block_bytes))
    source.write_blocks([BlockId(i) for i in (4, 0, 2)], memoryview(data))
    server, puller = Nixl(source, TransferConfig()), Nixl(own, TransferConfig())
    opened = pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_NIXL)
    server.describe(opened)
    target = PullTarget((BlockId(6), BlockId(3), BlockId(0)), {0, 1, 2})
    async with puller.fetch(PEER, opened, target) as receiver:
        (message,) = server.seal(0, [BlockId(i) for i in (4, 0, 2)])
        receiver.take(message)
    assert bytes(own.read_blocks([BlockId(i) for i in (6, 3, 0)])) == data


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("state_size", [0, 12], ids=["windows", "states"])
async def test_window_pages_in_their_own_pieces_arrive_in_their_own_places(state_size: int) -> None:
    shape = KvShape(
        num_layers=3,
        num_kv_heads=1,
        head_dim=4,
        block_size=4,
        dtype="bfloat16",
        row_bytes=8,
        fingerprint="",
        windowed=WindowedLayers(layers=(0, 2), num_tokens=1 if state_size else 9, state_size=state_size),
    )
    source, own = (
        TorchKvStore(shape, num_blocks, device=torch.device("cpu"), num_window_pages=num_pages)
        for num_blocks, num_pages in ((5, 3), (7, 4))
    )
    data = bytes(i % 251 for i in range(2 * shape.window_page_bytes))
    source.write_blocks([BlockId(5 + 2), BlockId(5 + 0)], memoryview(data))
    server, puller = Nixl(source, TransferConfig()), Nixl(own, TransferConfig())
    opened = pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_NIXL)
    server.describe(opened)
    async with puller.fetch(PEER, opened, PullTarget((BlockId(7 + 1), BlockId(7 + 3)), {0, 1})) as receiver:
        (message,) = server.seal(0, [BlockId(5 + 2), BlockId(5 + 0)])
        receiver.take(message)
    assert bytes(own.read_blocks([BlockId(7 + 1), BlockId(7 + 3)])) == data


@pytest.mark.usefixtures("either")
async def test_read_behind_the_end_of_the_lease_is_an_error_not_other_text() -> None:
    two = Two()
    before = two.pages()
    (message,) = two.server.seal(0, [BlockId(3), BlockId(5)])
    async with two.fetch() as (_, receiver):
        two.source.write_blocks([BlockId(5)], memoryview(bytes(32)))  # the page has a new owner
        with pytest.raises(KvIncomplete, match="checksum"):
            receiver.take(message)
    assert two.pages() == before
    assert two.target.missing == {0, 1}


@pytest.mark.parametrize("lie", ["nonce", "address", "size", "agent", "order"])
async def test_memory_that_is_not_the_peers_is_not_read(network: Network, lie: str) -> None:
    two = Two()
    memory = two.opened.nixl_memory
    match lie:
        case "nonce":
            memory.nonce = bytes(16)
        case "address":
            memory.address += 4096 << 20
        case "size":
            memory.size_bytes += 1
        case "agent":
            memory.agent = b"nobody"
        case _:
            memory.page_order = "another"
    with pytest.raises(KvIncomplete, match="cannot be mapped"):
        async with two.fetch():
            pass
    assert two.transports.offer(PEER, pb.OpenFetch()) == (), "the next pull goes by another transport"
    assert len(network.memories_of_last()) == 1, "scratch memory is left"


async def test_block_that_the_peer_does_not_have_is_not_read(network: Network) -> None:
    two = Two()
    async with two.fetch() as (_, receiver):
        with pytest.raises(KvIncomplete, match="no block 8"):
            receiver.take(pb.FetchBlocksResponse(sealed=pb.SealedBlocks(first_block=0, block_ids=[8], checksums=[0])))


@pytest.mark.parametrize("ending", [Ending.NEVER, Ending.IN_AN_ERROR])
async def test_dead_peer_ends_the_read_and_the_next_one_connects_anew(network: Network, ending: Ending) -> None:
    two = Two(read_timeout_s=0.05)
    (message,) = two.server.seal(0, [BlockId(3), BlockId(5)])
    async with two.fetch() as (_, receiver):
        network.ending = ending
        with pytest.raises(KvIncomplete, match="read"):
            receiver.take(message)
    assert two.target.missing == {0, 1}
    network.ending = Ending.LATER
    two.puller._agent._read_timeout_s = 60.0  # noqa: SLF001
    async with two.fetch() as (_, receiver):
        receiver.take(message)
    assert not two.target.missing
    assert network.num_connected == 2
    assert len(network.memories_of_last()) == 1, "scratch memory is left"


async def test_read_that_cannot_be_ended_keeps_its_memory_and_no_page(network: Network) -> None:
    two = Two(read_timeout_s=0.05)
    (message,) = two.server.seal(0, [BlockId(3), BlockId(5)])
    async with two.fetch() as (_, receiver):
        network.ending, network.may_be_ended = Ending.NEVER, False
        with pytest.raises(KvIncomplete, match="cannot be ended"):
            receiver.take(message)
    assert len(network.memories_of_last()) == 2, "the read may still write there"


def test_worker_without_the_package_or_with_pages_on_a_card_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    store = FakeKvStore(num_blocks=8, block_size=4)
    with pytest.raises(TransportUnusable, match="pip install") as refused:
        Nixl(store, TransferConfig())
    assert refused.value.key == "transfer.transports", "the launcher shows file and key in place of a traceback"
    store.shared_region = None
    with pytest.raises(TransportUnusable, match="device memory"):
        Nixl(store, TransferConfig())


_SERVER = """
import sys
from common.config import TransferConfig
from common.ids import BlockId
from engine.fake_pages import FakeKvStore
from kv_transfer.transports.nixl import Nixl
from kvrelay.v1 import kv_transfer_pb2 as pb
store = FakeKvStore(num_blocks=8, block_size=4)
server = Nixl(store, TransferConfig())
opened = pb.FetchOpened(transport=4)
server.describe(opened)
(message,) = server.seal(0, [BlockId(3), BlockId(5)])
print("told", opened.SerializeToString().hex(), message.SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[Callable[[], None], pb.FetchOpened, pb.FetchBlocksResponse]]:
    """A server in a process of its own: how to kill it, and what it tells a puller."""
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def kill() -> None:
            process.kill()
            process.wait()

        assert process.stdout is not None
        told = next(line for line in process.stdout if line.startswith("told ")).split()
        opened, message = (bytes.fromhex(text) for text in told[1:])
        yield kill, pb.FetchOpened.FromString(opened), pb.FetchBlocksResponse.FromString(message)
        kill()


@needs_nixl
@pytest.mark.parametrize("is_known", [False, True], ids=["before it was reached", "after it was reached"])
async def test_peer_that_is_killed_is_an_error_and_its_blocks_stay_missing(server: Any, is_known: bool) -> None:
    kill, opened, message = server
    puller = Nixl(FakeKvStore(num_blocks=8, block_size=4), TransferConfig())
    target = PullTarget((BlockId(6), BlockId(1)), {0, 1})
    if not is_known:
        kill()
        with pytest.raises(PeerMemoryUnreachable):
            async with puller.fetch(PEER, opened, target):
                pass
    else:
        async with puller.fetch(PEER, opened, target) as receiver:
            kill()
            with pytest.raises(KvIncomplete):
                receiver.take(message)
    assert target.missing == {0, 1}
