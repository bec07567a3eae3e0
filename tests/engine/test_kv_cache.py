"""The KV store, and the regions in which other processes see its bytes."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import LayoutMismatch
from common.ids import BlockId
from engine.device.memory import NoRoomForPages
from engine.device.shared_memory import allocate_region, map_peer_region
from engine.kv_store import NONCE_BYTES
from engine.model.tables import write_tables
from engine.pages.kv_cache import TorchKvStore, num_blocks_for_budget
from tests.engine.cuda_kv.support import make_shape

CPU = torch.device("cpu")


def make_store(
    dtype: str = "float32", num_blocks: int = 5, parts_per_layer: int = 2, *, is_like_device: bool = False
) -> TorchKvStore:
    """Return a store whose every element differs from its neighbours."""
    shape = make_shape(dtype=dtype, parts_per_layer=parts_per_layer)
    store = TorchKvStore(shape, num_blocks, device=CPU, is_like_device=is_like_device)
    for layer_idx, pages in enumerate(store.layers):
        for half, page in enumerate(pages):
            values = torch.arange(page.numel(), dtype=torch.float32) + 1000 * (2 * layer_idx + half)
            page.copy_(values.view(page.shape))
    return store


def ids(*block_ids: int) -> list[BlockId]:
    return [BlockId(i) for i in block_ids]


@pytest.mark.parametrize("is_like_device", [False, True])
@pytest.mark.parametrize("parts_per_layer", [1, 2])
def test_copy_block_when_copied_leaves_source_and_others_alone(parts_per_layer: int, is_like_device: bool) -> None:
    store = make_store(parts_per_layer=parts_per_layer, is_like_device=is_like_device)
    before = [bytes(store.read_blocks(ids(i))) for i in range(5)]
    store.copy_block(BlockId(2), BlockId(4))
    assert [bytes(store.read_blocks(ids(i))) for i in range(5)] == [*before[:4], before[2]]


@pytest.mark.parametrize("is_like_device", [False, True])
@pytest.mark.parametrize("parts_per_layer", [1, 2])
def test_clear_blocks_when_page_holds_nan_zeroes_that_page_only(parts_per_layer: int, is_like_device: bool) -> None:
    store = make_store(parts_per_layer=parts_per_layer, is_like_device=is_like_device)
    store.layers[1][-1][3].fill_(float("nan"))
    before = bytes(store.read_blocks(ids(0, 1, 2, 4)))
    store.clear_blocks(ids(3))
    assert not any(store.read_blocks(ids(3)))
    assert bytes(store.read_blocks(ids(0, 1, 2, 4))) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("parts_per_layer", [1, 2])
def test_block_in_device_memory_is_one_piece_with_the_bytes_that_travel(dtype: str, parts_per_layer: int) -> None:
    ours, hosts = (
        make_store(dtype, parts_per_layer=parts_per_layer, is_like_device=is_device) for is_device in (True, False)
    )
    first = ours.layers[0][0]
    storage = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
    size = ours.shape.block_bytes
    for block_id in range(ours.num_blocks):
        assert first[block_id].data_ptr() - first.data_ptr() == block_id * size
        piece = storage[block_id * size : (block_id + 1) * size].numpy().tobytes()
        assert piece == bytes(ours.read_blocks(ids(block_id))) == bytes(hosts.read_blocks(ids(block_id)))


def test_blocks_between_host_and_device_memory_keep_every_element() -> None:
    host, like_device = make_store(num_blocks=5), make_store(num_blocks=7, is_like_device=True)
    like_device.write_blocks(ids(6, 1, 2), host.read_blocks(ids(0, 3, 4)))
    for ours, theirs in zip(like_device.layers, host.layers, strict=True):
        for page, expected in zip(ours, theirs, strict=True):
            assert torch.equal(page[[6, 1, 2]], expected[[0, 3, 4]])


def test_documents_have_the_tables_of_models_that_the_code_gives() -> None:
    serving = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert serving.count("<!-- models: ") == 2
    assert write_tables(serving) == serving, "make tables"


def test_num_blocks_for_budget_when_budget_is_between_pages_rounds_down() -> None:
    shape = make_shape()
    assert num_blocks_for_budget(3 * shape.block_bytes - 1, shape) == 2
    assert num_blocks_for_budget(3 * shape.block_bytes, shape) == 3
    with pytest.raises(NoRoomForPages, match="hold no page"):
        num_blocks_for_budget(shape.block_bytes - 1, shape)


def test_map_peer_when_region_has_another_size_reports_layout_mismatch() -> None:
    store = make_store()
    with pytest.raises(LayoutMismatch, match="expected"):
        store.map_peer(memoryview(bytes(5 * store.shape.block_bytes + NONCE_BYTES - 1)), 5)


_PEER = """
    import sys, torch
    import engine.loading  # as a worker does
    assert "transformers" not in sys.modules, "its import takes seconds, at every start"
    from engine.kv_store import KvShape
    from engine.pages.kv_cache import TorchKvStore
    from engine.device.shared_memory import map_peer_region
    pid, fd, size_bytes, nonce = sys.argv[1:]
    shape = KvShape(num_layers=3, num_kv_heads=2, head_dim=6, block_size=4, dtype="bfloat16", row_bytes=12,
                    fingerprint="test")
    region = map_peer_region(pid=int(pid), fd=int(fd), size_bytes=int(size_bytes), nonce=bytes.fromhex(nonce))
    pages = TorchKvStore(shape, 2, device=torch.device("cpu")).map_peer(memoryview(region), 5)
    sys.stdout.buffer.write(pages.read_blocks([4, 0, 2]))
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous memory files on this system")
def test_process_of_a_worker_maps_a_peer_without_warnings_or_transformers() -> None:
    store = make_store("bfloat16")
    region = store.shared_region
    assert region is not None
    arguments = [str(os.getpid()), str(region.fd), str(region.size_bytes), region.nonce.hex()]
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(_PEER), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert done.stderr.decode() == ""
    assert np.frombuffer(done.stdout, np.uint8).tobytes() == bytes(store.read_blocks(ids(4, 0, 2)))


@pytest.mark.parametrize("parts_per_layer", [1, 2])
def test_blocks_read_by_a_peer_fill_its_own_pages(parts_per_layer: int) -> None:
    source, target = (make_store(num_blocks=num, parts_per_layer=parts_per_layer) for num in (5, 7))
    region = source.shared_region
    assert region is not None
    mapped = map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce)
    target.write_blocks(ids(6, 1), target.map_peer(memoryview(mapped), 5).read_blocks([4, 0]))
    for ours, theirs in zip(target.layers, source.layers, strict=True):
        for page, expected in zip(ours, theirs, strict=True):
            assert torch.equal(page[[6, 1]], expected[[4, 0]])


def test_peer_sees_what_is_written_and_only_with_the_right_nonce_and_size() -> None:
    memory, region = allocate_region(64)
    assert region is not None
    peer = map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce)
    memory[:5] = b"hello"
    assert peer[:5] == b"hello"
    for size_bytes, nonce in ((region.size_bytes, b"x" * NONCE_BYTES), (region.size_bytes + 1, region.nonce)):
        with pytest.raises(OSError, match="/proc/"):
            map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=size_bytes, nonce=nonce)


def test_dropped_region_closes_its_descriptor_and_survives_in_a_mapping() -> None:
    memory, region = allocate_region(64)
    assert region is not None
    memory[:5] = b"hello"
    peer = map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce)
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)
    assert peer[:5] == b"hello"


def test_descriptor_of_a_named_pipe_or_an_empty_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it waits for a writer
    pipe, empty = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), os.memfd_create("empty")
    try:
        for fd in (pipe, empty):
            with pytest.raises(OSError, match="/proc/"):
                map_peer_region(pid=os.getpid(), fd=fd, size_bytes=0, nonce=b"x" * NONCE_BYTES)
    finally:
        os.close(pipe)
        os.close(empty)


def test_region_keeps_its_size_so_that_no_peer_can_kill_its_readers() -> None:
    _memory, region = allocate_region(64)
    assert region is not None
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size_bytes)
