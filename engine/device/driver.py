"""Calls of the CUDA driver that torch does not expose: sharing an allocation among processes.

They use the driver library directly: it exists wherever a GPU works, under one name, with stable entry points
(https://docs.nvidia.com/cuda/cuda-driver-api, "Memory Management").
"""

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_ENABLE_PEER_ACCESS = 1  # the only flag, and a required one


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


_ENTRY_POINTS = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceCanAccessPeer": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64),
    "cuIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
}


class CudaDriver:
    """An `IpcDriver` for one device, in the context that torch uses. Any thread."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index. Raises OSError without a driver, AttributeError when it is too old."""
        self._device = device
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, argument_types in _ENTRY_POINTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = argument_types, ctypes.c_int
        self._call("cuInit", 0)
        ordinal = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(ordinal), device.index)
        self.device_uuid = self._uuid_of(ordinal)
        self.readable_devices = (self.device_uuid, *self._readable_from(ordinal))
        # The primary context is the one that torch uses. It is retained for the life of the process.
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation around a device address, and the address' offset in it."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = _IpcHandle()
        with self._current():
            # torch cuts its tensors out of larger allocations, and only whole allocations can be shared.
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
        return bytes(handle), address - base.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its device address here."""
        if len(handle) != _HANDLE_BYTES:
            raise OSError(f"cannot open a handle of {len(handle)} bytes: it must have {_HANDLE_BYTES}")
        address = ctypes.c_uint64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _IpcHandle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return address.value

    def close(self, address: int) -> None:
        """Undo `open`."""
        with self._current():
            self._call("cuIpcCloseMemHandle", address)

    def view(self, address: int, num_bytes: int) -> Tensor:
        """Return memory that this device can read as uint8 [num_bytes], without owning it."""
        # The array interface would copy: it takes memory of another device for a tensor there.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, num_bytes)  # noqa: SLF001
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _uuid_of(self, ordinal: ctypes.c_int) -> str:
        found = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), ordinal)
        return str(uuid.UUID(bytes=bytes(found.bytes)))

    def _readable_from(self, ordinal: ctypes.c_int) -> Iterator[str]:
        """Yield the other visible devices whose memory this one can read."""
        num_devices, peer, can_read = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(num_devices))
        for index in range(num_devices.value):
            self._call("cuDeviceGet", ctypes.byref(peer), index)
            if peer.value != ordinal.value:
                self._call("cuDeviceCanAccessPeer", ctypes.byref(can_read), ordinal, peer)
                if can_read.value:
                    yield self._uuid_of(peer)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context current, for threads that have not used the device yet."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise OSError(f"{name}: {text.value.decode() if text.value else result}")
