"""The pages of the fake engine, in which the KV of a token is 8 bytes."""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from common.ids import BlockId
from engine.device.shared_memory import allocate_region
from engine.fake_model import U64
from engine.kv_store import NONCE_BYTES, DeviceSharing, HostRing, KvShape, WindowedLayers, check_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWindow:
    """A layer with window pages, or state pages, besides the one that sees everything."""

    num_tokens: int
    num_pages: int
    is_state: bool = False
    """Whether the layer is recurrent; num_tokens is then 1."""
    is_chunk: bool = False
    """See `Window`."""


def fake_shape(block_size: int, window: FakeWindow | None = None) -> KvShape:
    """Return the shape of the fake's blocks, and window pages: 8 bytes per token. A state page is as large."""
    windowed = None
    if window is not None:
        windowed = WindowedLayers(
            layers=(1,),
            num_tokens=window.num_tokens,
            is_chunk=window.is_chunk,
            state_size=2 * block_size if window.is_state else 0,
        )
    return KvShape(
        num_layers=1 if window is None else 2,
        num_kv_heads=1,
        head_dim=4,
        block_size=block_size,
        dtype="uint8",
        row_bytes=4,
        fingerprint=f"fake-v1-{block_size}" if windowed is None else f"fake-v1-{block_size}/{windowed.window}",
        windowed=windowed,
    )


def fake_state(values: Seq[int] | U64) -> U64:
    """Return the state behind tokens with this KV, uint64 [2]: their sum and their number, which tell repeats."""
    return np.array([sum(map(int, values)) % (1 << 64), len(values)], dtype=np.uint64)


class FakeKvStore:
    """Pages of the fake engine: uint64 [num_blocks, block_size] in shareable memory."""

    def __init__(self, num_blocks: int, block_size: int, window: FakeWindow | None = None) -> None:
        self.shape = fake_shape(block_size, window)
        self.num_blocks = num_blocks
        self.num_window_pages = 0 if window is None else window.num_pages
        self.window_page_of = array("i", [-1]) * num_blocks
        self.device_sharing: DeviceSharing | None = None
        self.host_ring: HostRing | None = None
        memory, self.shared_region = allocate_region((num_blocks + self.num_window_pages) * self.shape.block_bytes)
        self._pages = self._view(memoryview(memory))
        self.queue: deque[Callable[[], None]] = deque()
        """Launched work that is not computed yet, in order."""

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes."""
        return memoryview(self._pages[list(block_ids)].tobytes())

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes."""
        values = np.frombuffer(data, dtype="<u8")
        self._pages[list(block_ids)] = values.reshape(len(block_ids), self.shape.block_size)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block, after the steps launched so far."""
        sources, targets = self.with_windows([source]), self.with_windows([target])

        def copy() -> None:
            self._pages[targets] = self._pages[sources]

        self.queue.append(copy)

    def map_peer(self, region: memoryview, num_blocks: int) -> "FakePeerPages":
        """Interpret another process's region as pages. Raises LayoutMismatch when its size is wrong."""
        self.shape.check_region(region.nbytes, num_blocks)
        return FakePeerPages(self._view(region))

    def with_windows(self, block_table: Seq[int]) -> list[int]:
        """Return pages of blocks, then their window pages as they are now; -1 where a block has none."""
        if self.shape.windowed is None:
            return list(block_table)
        pages = (self.window_page_of[block_id] for block_id in block_table)
        return [*block_table, *(-1 if page < 0 else self.num_blocks + page for page in pages)]

    def write_tokens(self, pages: Seq[int], start: int, values: Seq[int]) -> None:
        """Store the KV of consecutive tokens from `start` on in pages `with_windows`, and the state behind the last."""
        size, half = self.shape.block_size, len(pages) // 2
        for position, value in enumerate(values, start):
            self._pages[pages[position // size], position % size] = value
            if self.shape.window_layers:
                window_page = pages[half + position // size]
                assert window_page >= 0, f"no window page for the token at {position}"
                self._pages[window_page, position % size] = value
        if self.shape.state_layers:
            last = start + len(values) - 1
            state = self._state(pages, start) + fake_state(values)
            assert pages[half + last // size] >= 0, f"no state page for the token at {last}"
            self._pages[pages[half + last // size], : len(state)] = state

    def _state(self, pages: Seq[int], num_tokens: int) -> U64:
        """Return the state that a step reads which begins behind so many tokens, uint64 [2]."""
        if not num_tokens:
            return fake_state([])
        return self._pages[pages[len(pages) // 2 + (num_tokens - 1) // self.shape.block_size], :2]

    def context(self, pages: Seq[int], num_tokens: int) -> U64:
        """Return `gather` of all tokens of a sequence; other values where its state is not that of these tokens."""
        found = self.gather(pages, num_tokens)
        if self.shape.state_layers and not np.array_equal(self._state(pages, num_tokens), fake_state(found)):
            return found + np.uint64(1)
        return found

    def gather(self, pages: Seq[int], num_tokens: int) -> U64:
        """Return the KV of the first tokens in pages `with_windows`, uint64 [num_tokens]."""
        num_blocks = -(-num_tokens // self.shape.block_size)
        found = self._pages[list(pages[:num_blocks])].reshape(-1)[:num_tokens]
        if self.shape.windowed is not None and self.shape.window_layers:
            begin = max(0, self.shape.windowed.window.first_visible(num_tokens - 1))
            half = len(pages) // 2
            latest = self._pages[list(pages[half : half + num_blocks])].reshape(-1)[begin:num_tokens]
            found = np.concatenate([found[:begin], latest])
        return found

    def _view(self, region: memoryview) -> U64:
        pages = np.frombuffer(region[:-NONCE_BYTES], dtype="<u8")
        return pages.reshape(-1, self.shape.block_size)


class FakePeerPages:
    """Another fake engine's pages, read-only."""

    def __init__(self, pages: U64) -> None:
        self._pages = pages

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes. Raises LayoutMismatch for a bad id."""
        check_ids(block_ids, len(self._pages))
        return memoryview(self._pages[list(block_ids)].tobytes())
