"""The seam between the KV plane and pages: the shape of a block, and where other processes find the pages."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from common.errors import LayoutMismatch
from common.ids import BlockId
from engine.window import BlockWindow, Window

STATE_ITEM_BYTES = 4
PIECE_BYTES = 16 << 20
"""Bytes that one copy of blocks moves: large enough to amortise its calls, small enough to bound memory."""
NONCE_BYTES = 16
"""Random bytes at the end of a shared region, by which a peer verifies that it mapped the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape of one block; equal fingerprints mean exchangeable blocks."""

    num_layers: int
    """Layers with keys and values of their own."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """Name of the pages' format, such as "bfloat16" or "int8"."""
    row_bytes: int
    """Bytes of one token's row of one head, with its scales."""
    fingerprint: str
    """Hash of the model weights, the dtype and all fields above."""
    parts_per_layer: int = 2
    """Rows of a token, layer and head: its key and its value; 1: a latent row, which is both."""
    windowed: "WindowedLayers | None" = None
    """Layers that have pages of their own; None: every layer's keys and values are in the blocks."""

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values are in window pages."""
        return self.windowed.layers if self.windowed is not None and not self.windowed.has_states else ()

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Recurrent layers."""
        return self.windowed.layers if self.windowed is not None and self.windowed.has_states else ()

    @property
    def block_window(self) -> BlockWindow | None:
        """Window whose pages it takes to go on behind some blocks; None where no layer has any."""
        return None if self.windowed is None else BlockWindow(window=self.windowed.window, block_size=self.block_size)

    @property
    def bytes_per_token(self) -> int:
        """Rows of one token, all layers that have any."""
        num_layers = self.num_layers - len(self.state_layers)
        return num_layers * self.parts_per_layer * self.num_kv_heads * self.row_bytes

    @property
    def num_parts(self) -> int:
        """Parts of a block's own page: one layer's keys, values or latent rows each."""
        num_windowed = 0 if self.windowed is None else len(self.windowed.layers)
        return (self.num_layers - num_windowed) * self.parts_per_layer

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on the wire, contiguous: [parts], each [block_size, num_kv_heads] rows."""
        return self.num_parts * self.part_bytes

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a window page, likewise, or of a state page: [layers], a state each; 0 where no layer has any."""
        return self.num_windowed_parts * self.windowed_part_bytes

    @property
    def num_windowed_parts(self) -> int:
        """Parts of a window page, or states of a state page."""
        return len(self.window_layers) * self.parts_per_layer + len(self.state_layers)

    @property
    def windowed_part_bytes(self) -> int:
        """Bytes of one of these."""
        if self.windowed is not None and self.windowed.has_states:
            return self.windowed.state_size * STATE_ITEM_BYTES
        return self.part_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of a block's own page."""
        return self.num_kv_heads * self.row_bytes * self.block_size

    def check_data(self, data: memoryview, num_blocks: int) -> None:
        """Raise LayoutMismatch unless `data` holds exactly `num_blocks` blocks."""
        if data.nbytes != num_blocks * self.block_bytes:
            raise LayoutMismatch(f"{num_blocks} blocks take {num_blocks * self.block_bytes} bytes, not {data.nbytes}")

    def check_region(self, size_bytes: int, num_blocks: int) -> int:
        """Return the window pages of a region of `num_blocks` blocks and a nonce. Raises LayoutMismatch."""
        expected = num_blocks * self.block_bytes + NONCE_BYTES
        num_pages = max(0, size_bytes - expected) // self.window_page_bytes if self.windowed else 0
        if size_bytes != expected + num_pages * self.window_page_bytes:
            raise LayoutMismatch(f"a region of {num_blocks} blocks has {size_bytes} bytes, expected {expected}")
        return num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedLayers:
    """Layers that see the latest tokens only, or recurrent ones, which have a state behind the latest token."""

    layers: tuple[int, ...]
    num_tokens: int
    """Size of the window of all of them; 1 with states."""
    is_chunk: bool = False
    """See `Window`."""
    state_size: int = 0
    """Values of the state of a recurrent layer, float32; 0: the layers have keys and values."""

    @property
    def window(self) -> Window:
        """Window of all of them."""
        return Window(num_tokens=self.num_tokens, is_chunk=self.is_chunk)

    @property
    def has_states(self) -> bool:
        """Whether the layers are recurrent."""
        return self.state_size > 0


def check_ids(block_ids: Seq[int], num_blocks: int) -> None:
    """Raise LayoutMismatch for an id outside: on a device it would end the process, or read memory of another user."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        bad = next(block_id for block_id in block_ids if not 0 <= block_id < num_blocks)
        raise LayoutMismatch(f"there is no block {bad} among {num_blocks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegion:
    """Address of the pages for other processes of this host: an anonymous memory file, freed with its last user."""

    fd: int
    size_bytes: int
    nonce: bytes
    """Content of the last NONCE_BYTES of the region."""
    num_pieces: int = 1
    """Contiguous pieces of a block: the region is [num_pieces, num_blocks, bytes of a piece], window pages likewise and
    the nonce."""
    num_window_pieces: int = 1
    """Contiguous pieces of a window page."""
    page_order: str = ""
    """Name of the order of the elements in a page; empty when it follows from the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRegion:
    """Address of the pages for other processes on the same card, or on one that can read its memory."""

    handle: bytes
    """Handle of the device allocation that holds the pages (cudaIpcMemHandle_t)."""
    offset_bytes: int
    """Offset of the pages in that allocation."""
    size_bytes: int
    device_uuid: str
    nonce: bytes
    """Content of the last NONCE_BYTES of the region."""


class DevicePeerPages(Protocol):
    """Pages of another process in the memory of our own device. Any thread."""

    def copy_blocks(self, sources: Seq[int], targets: Seq[BlockId]) -> None:
        """Copy the peer's pages into ours and wait for the copy. Raises LayoutMismatch for a bad id."""
        ...

    def close(self) -> None:
        """Unmap the pages. No copy may be running."""
        ...


class DeviceSharing(Protocol):
    """Pages in device memory that processes on the same card, or on one that can read it, may map."""

    region: DeviceRegion
    readable_devices: tuple[str, ...]
    """UUIDs of the cards whose memory ours can read, itself first."""

    def map_peer(self, region: DeviceRegion, num_blocks: int) -> DevicePeerPages:
        """Map another process's region of equally shaped pages. Takes milliseconds. Raises TransferError."""
        ...


class HostRing(Protocol):
    """Host memory into which pages in device memory are copied for other processes of the host.

    It has slots of consecutive blocks, [num_slots, blocks_per_slot, block_bytes], then a nonce.
    """

    region: SharedRegion
    num_slots: int
    blocks_per_slot: int

    def fill(self, slot: int, block_ids: Seq[BlockId]) -> range:
        """Copy at most a slot's blocks into it and return their places, counted in blocks. Any thread."""
        ...


class KvStore(Protocol):
    """The pages' bytes. Reads and writes of blocks that the caller holds are safe from any thread.

    Window pages are read and written like blocks, whose ids theirs follow: page i is number num_blocks + i. One call
    names pages of one kind.
    """

    shape: KvShape
    num_blocks: int
    shared_region: SharedRegion | None
    """Region of the pages; None when they are not in shareable host memory."""
    device_sharing: DeviceSharing | None
    """Sharing of the pages; None when they are not in device memory, or the device cannot share it."""
    host_ring: HostRing | None
    """Ring of copies; None when the pages are in host memory, or the system cannot share any."""

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes, [len(block_ids) * block_bytes]."""
        ...

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes laid out as `read_blocks` returns them."""
        ...

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block inside the pool, in order with the steps. Engine thread only."""
        ...

    def map_peer(self, region: memoryview, num_blocks: int) -> "PeerPages":
        """Interpret another process's region (same shape) as pages. Raises LayoutMismatch when its size is wrong."""
        ...


def page_bytes_of(store: KvStore, page_ids: Seq[int]) -> int:
    """Return the bytes of each of these pages."""
    is_window = has_windows(store) and page_ids and page_ids[0] >= store.num_blocks
    return store.shape.window_page_bytes if is_window else store.shape.block_bytes


class WindowedKvStore(Protocol):
    """A `KvStore` with window pages."""

    shape: KvShape
    num_blocks: int
    num_window_pages: int
    window_page_of: "array[int]"
    """Window page of each block, -1 for none. Changed by the engine's bookkeeping."""


def has_windows(store: KvStore) -> TypeGuard[WindowedKvStore]:
    """Return whether a store has window pages."""
    return store.shape.windowed is not None


class PeerPages(Protocol):
    """Pages of another process, mapped read-only."""

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes. Raises LayoutMismatch for a bad id."""
        ...
