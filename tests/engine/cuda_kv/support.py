"""Pages with random content, and a driver that shares memory within this process."""

import torch
from torch import Tensor

from engine.device.kv_copy import DevicePages
from engine.kv_store import NONCE_BYTES, KvShape
from engine.pages.kv_format import format_named

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def make_shape(
    *,
    dtype: str = "bfloat16",
    head_dim: int = 6,
    num_kv_heads: int = 2,
    block_size: int = 4,
    parts_per_layer: int = 2,
) -> KvShape:
    return KvShape(
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        row_bytes=format_named(dtype).row_bytes(head_dim),
        fingerprint="test",
        parts_per_layer=parts_per_layer,
    )


def make_storage(shape: KvShape, num_blocks: int, *, seed: int = 0) -> Tensor:
    """Return random bytes for `num_blocks` pages and a nonce."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = num_blocks * shape.block_bytes + NONCE_BYTES
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).to(DEVICE)


def pages_in(storage: Tensor, shape: KvShape, *, staging_blocks: int = 3) -> DevicePages:
    """Return the pages in a storage, with staging so small that larger copies take several rounds."""
    return DevicePages(storage[:-NONCE_BYTES], shape, staging_bytes=staging_blocks * shape.block_bytes)


def wire_bytes(storage: Tensor, shape: KvShape, block_ids: list[int]) -> bytes:
    """Return blocks of device pages as they travel, by plain indexing."""
    blocks = storage[:-NONCE_BYTES].cpu().view(-1, shape.block_bytes)
    return blocks[block_ids].numpy().tobytes()


class Card:
    """The memory of one device, as the processes on it would share it."""

    def __init__(self) -> None:
        self.exported: dict[bytes, Tensor] = {}
        self.num_open = 0


class CardDriver:
    """An `IpcDriver` of one process on a card. Allocations begin 64 bytes before the tensors in them."""

    def __init__(self, card: Card, device_uuid: str = "card-0", *, reads: tuple[str, ...] = ()) -> None:
        self.device_uuid = device_uuid
        self.readable_devices = (device_uuid, *reads)
        self.card = card
        self._own: list[Tensor] = []
        self._opened: dict[int, Tensor] = {}

    def own(self, storage: Tensor) -> None:
        """Make a storage's address exportable."""
        self._own.append(storage)

    def export(self, address: int) -> tuple[bytes, int]:
        storage = next((own for own in self._own if own.data_ptr() == address), None)
        if storage is None:
            raise OSError("CUDA_ERROR_INVALID_VALUE")
        handle = f"handle-{len(self.card.exported)}".encode()
        self.card.exported[handle] = storage
        return handle, 64

    def open(self, handle: bytes) -> int:
        if handle not in self.card.exported:
            raise OSError("CUDA_ERROR_INVALID_HANDLE")
        self.card.num_open += 1
        address = 4096 * (1 + len(self._opened))
        self._opened[address] = self.card.exported[handle]
        return address

    def close(self, address: int) -> None:
        del self._opened[address]
        self.card.num_open -= 1

    def view(self, address: int, num_bytes: int) -> Tensor:
        base = address // 4096 * 4096
        assert address - base == 64, "the offset that was exported"
        memory = self._opened[base]
        assert memory.numel() == num_bytes
        return memory
