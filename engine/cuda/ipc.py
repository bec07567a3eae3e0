"""Pages in device memory, shared among the processes on one card.

The owner of the pages tells a handle of the allocation that holds them, once, at start. Another process on the same
card maps the allocation and copies pages out of it by itself, device to device, without a byte passing through the
host. It never writes there. Random bytes behind the pages are compared with those told over gRPC: proof that the right
memory was mapped.

A mapping keeps the memory of a dead owner allocated, so whoever maps must unmap soon after use.
"""

import logging
import secrets
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from common.errors import LayoutMismatch, TransferError
from common.ids import BlockId
from engine.cuda.kv_copy import DevicePages
from engine.executor import DeviceRegion
from engine.shared_memory import NONCE_BYTES

logger = logging.getLogger(__name__)


class IpcDriver(Protocol):
    """What sharing needs of a device's driver. Any thread; every call raises OSError when the driver refuses it."""

    device_uuid: str

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation around a device address, and the address' offset in it."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its device address here."""
        ...

    def close(self, address: int) -> None:
        """Undo `open`."""
        ...

    def view(self, address: int, num_bytes: int) -> Tensor:
        """Return device memory as uint8 [num_bytes], without owning it."""
        ...


class SharedDevicePages:
    """The pages of one engine as others may map them; a `DeviceSharing`."""

    def __init__(self, storage: Tensor, pages: DevicePages, driver: IpcDriver) -> None:
        """`storage` uint8 is the pages followed by NONCE_BYTES, which are written here. Raises OSError."""
        handle, offset_bytes = driver.export(storage.data_ptr())
        nonce = secrets.token_bytes(NONCE_BYTES)
        storage[-NONCE_BYTES:] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
        self._pages = pages
        self._driver = driver
        self.region = DeviceRegion(
            handle=handle,
            offset_bytes=offset_bytes,
            size_bytes=storage.numel(),
            device_uuid=driver.device_uuid,
            nonce=nonce,
        )

    def map_peer(self, region: DeviceRegion, num_blocks: int) -> "MappedPages":
        """Map another process's region of equally shaped pages. Takes milliseconds. Raises TransferError."""
        if region.device_uuid != self.region.device_uuid:
            raise LayoutMismatch(f"the pages are on device {region.device_uuid}, ours on {self.region.device_uuid}")
        expected = self._pages.num_bytes(num_blocks) + NONCE_BYTES
        if region.size_bytes != expected:
            raise LayoutMismatch(f"a region of {num_blocks} blocks has {region.size_bytes} bytes, expected {expected}")
        try:
            address = self._driver.open(region.handle)
        except OSError as error:
            raise TransferError(f"the device memory cannot be mapped: {error}") from error
        try:
            memory = self._driver.view(address + region.offset_bytes, region.size_bytes)
            nonce = self._pages.read_bytes(memory[-NONCE_BYTES:])
            if nonce != region.nonce:
                raise TransferError("the device memory that was mapped is not the peer's")
            return MappedPages(self._pages.view_of(memory[:-NONCE_BYTES]), self._pages, self._driver, address)
        except BaseException as error:
            self._driver.close(address)
            if isinstance(error, RuntimeError):  # torch, of memory that it does not take
                raise TransferError(f"the device memory cannot be read: {error}") from error
            raise


class MappedPages:
    """Pages of another process in our device's memory; a `DevicePeerPages`."""

    def __init__(self, blocks: Tensor, own: DevicePages, driver: IpcDriver, address: int) -> None:
        self._blocks: Tensor | None = blocks
        self._own = own
        self._driver = driver
        self._address = address

    def copy_blocks(self, sources: Seq[int], targets: Seq[BlockId]) -> None:
        """Copy the peer's pages into ours; they are there when this returns. Raises LayoutMismatch for a bad id."""
        assert self._blocks is not None, "the pages are unmapped"
        self._own.copy_blocks(self._blocks, sources, targets)

    def close(self) -> None:
        """Unmap the pages; no copy is running. Harmless the second time."""
        if self._blocks is not None:
            self._blocks = None
            self._driver.close(self._address)


def share_pages(storage: Tensor, pages: DevicePages) -> SharedDevicePages | None:
    """Return the pages as others may map them, or None, with the reason in the log, where the system cannot share."""
    if storage.device.type != "cuda":
        return None
    from engine.cuda.driver import CudaDriver

    try:
        return SharedDevicePages(storage, pages, CudaDriver(storage.device))
    except (OSError, AttributeError) as error:  # no driver library, an entry point that it lacks, or a refusal
        logger.warning("KV pages on %s cannot be shared with other processes: %s", storage.device, error)
        return None
