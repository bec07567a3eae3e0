"""Pages in device memory, shared among the processes on one card, or on cards that can read each other's memory.

The owner of the pages publishes a handle of their allocation once, at start. Another process maps the allocation and
copies pages out of it, device to device, without a byte passing through the host. It never writes there. Of another
card, the mapping is read over NVLink or PCIe; the driver says which cards can do that, among those that both processes
see.
Random bytes after the pages are compared with those received over gRPC, as proof that the right memory was mapped.

A mapping keeps the memory of a dead owner allocated, so that it must be unmapped when the owner dies.
"""

import logging
import os
import secrets
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from common.errors import LayoutMismatch, TransferError
from common.ids import BlockId
from engine.device.kv_copy import DevicePages
from engine.kv_store import NONCE_BYTES, DeviceRegion

logger = logging.getLogger(__name__)


class IpcDriver(Protocol):
    """Driver of a device, as far as sharing needs it. Any thread; calls raise OSError when the driver refuses them."""

    device_uuid: str
    readable_devices: tuple[str, ...]
    """UUIDs of the visible devices whose memory this one can read, itself first."""

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
        """Return memory that this device can read as uint8 [num_bytes], without owning it."""
        ...


class SharedDevicePages:
    """Pages of one engine that others may map; a `DeviceSharing`."""

    def __init__(self, storage: Tensor, pages: DevicePages, driver: IpcDriver) -> None:
        """`storage` uint8 is the pages followed by NONCE_BYTES, which are written here. Raises OSError."""
        handle, offset_bytes = driver.export(storage.data_ptr())
        nonce = secrets.token_bytes(NONCE_BYTES)
        storage[-NONCE_BYTES:] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
        self._pages = pages
        self._driver = driver
        self.readable_devices = driver.readable_devices
        self.region = DeviceRegion(
            handle=handle,
            offset_bytes=offset_bytes,
            size_bytes=storage.numel(),
            device_uuid=driver.device_uuid,
            nonce=nonce,
        )

    def map_peer(self, region: DeviceRegion, num_blocks: int) -> "MappedPages":
        """Map another process's region of equally shaped pages. Takes milliseconds. Raises TransferError."""
        if region.device_uuid not in self.readable_devices:
            raise LayoutMismatch(
                f"cannot map pages on device {region.device_uuid}: ours, {self.region.device_uuid}, cannot read it"
            )
        self._pages.shape.check_region(region.size_bytes, num_blocks)
        try:
            address = self._driver.open(region.handle)
        except OSError as error:
            raise TransferError(f"cannot map the device memory: {error}") from error
        try:
            memory = self._driver.view(address + region.offset_bytes, region.size_bytes)
            nonce = self._pages.read_bytes(memory[-NONCE_BYTES:])
            if nonce != region.nonce:
                raise TransferError("cannot use the mapped device memory: it is not the peer's")
            return MappedPages(self._pages.view_of(memory[:-NONCE_BYTES]), self._pages, self._driver, address)
        except BaseException as error:
            self._driver.close(address)
            if isinstance(error, RuntimeError):  # torch rejects the memory
                raise TransferError(f"cannot read the device memory: {error}") from error
            raise


class MappedPages:
    """Pages of another process in our device's memory; a `DevicePeerPages`."""

    def __init__(self, blocks: Tensor, own: DevicePages, driver: IpcDriver, address: int) -> None:
        self._blocks: Tensor | None = blocks
        self._own = own
        self._driver = driver
        self._address = address

    def copy_blocks(self, sources: Seq[int], targets: Seq[BlockId]) -> None:
        """Copy the peer's pages into ours and wait for the copy. Raises LayoutMismatch for a bad id."""
        assert self._blocks is not None, "the pages are unmapped"
        self._own.copy_blocks(self._blocks, sources, targets)

    def close(self) -> None:
        """Unmap the pages. No copy may be running. Harmless the second time."""
        if self._blocks is not None:
            self._blocks = None
            self._driver.close(self._address)


def share_pages(storage: Tensor, pages: DevicePages) -> SharedDevicePages | None:
    """Return pages that others may map, or None, with the reason in the log, when the system cannot share them."""
    if storage.device.type != "cuda":
        return None
    from engine.device.driver import CudaDriver

    try:
        return SharedDevicePages(storage, pages, CudaDriver(storage.device))
    except (OSError, AttributeError) as error:  # no driver library, no such entry point, or a refusal
        advice = "; leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF" if _has_expandable_segments() else ""
        logger.warning("cannot share KV pages on %s with other processes: %s%s", storage.device, error, advice)
        return None


def _has_expandable_segments() -> bool:
    """Return whether torch was told to allocate memory of which the driver makes no handles."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in each.replace(" ", "").lower() for each in settings)
