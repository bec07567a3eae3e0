"""Features that only CUDA has (pinned memory, asynchronous copies, events, graphs), with a twin for the CPU.

Code above a device runs unchanged on both, so that tests need no GPU. All work of a device is ordered: it runs on the
thread's current stream, in the order of its launch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.memory import DeviceMemory, measure_host
from engine.executor import DeviceBroken

Words: TypeAlias = npt.NDArray[np.int64]
Fetch: TypeAlias = Callable[[], Words]
"""Waits for a copy to the host, but for no later work, and returns its words."""
T = TypeVar("T")

# Memory of a process's context and loaded kernels, which CUDA does not report.
_CONTEXT_BYTES = 1 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Memory that some work needs."""

    device: DeviceMemory
    """The device while the work does not run."""
    peak_bytes: int
    """Additional memory at the work's peak."""


class HostDevice:
    """A CPU, which does all work at once; the base class of `CudaDevice`. One thread."""

    def staging(self, num_words: int) -> Tensor:
        """Return uninitialised host memory, int64 [num_words], that `send` copies from without waiting."""
        return torch.empty(num_words, dtype=torch.int64)

    def send(self, staged: Tensor, target: Tensor) -> None:
        """Start a copy of `staging`'s memory to the device. Afterwards it may be dropped, but not refilled."""
        target.copy_(staged, non_blocking=True)

    def fetch(self, words: Tensor) -> Fetch:
        """Start a copy of an int64 tensor [num_words] to the host."""
        return words.numpy

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return a function that repeats `run`, which only launches work and returns tensors, in one launch.

        It works on the current content of the inputs; its result is valid until any captured work runs again. May call
        `run`. Raises RuntimeError when the work cannot be captured.
        """
        return run

    def synchronize(self) -> None:
        """Wait for all launched work."""

    def measure(self, run: Callable[[], object]) -> MeasuredMemory:
        """Return the memory that `run` needs, by running it; nothing is kept for it. A CPU's peak is not measured."""
        run()
        return MeasuredMemory(device=self.memory(), peak_bytes=0)

    def memory(self) -> DeviceMemory:
        """Return the memory as it is now."""
        host = measure_host()
        total = host.available_bytes + host.process_bytes
        return DeviceMemory(total_bytes=total, free_bytes=host.available_bytes, process_bytes=host.process_bytes)


class CudaDevice(HostDevice):
    """A CUDA device.

    Pinned memory comes from torch's caching allocator, which reuses it only after the copies from or into it have
    ended: no ring of buffers and no event per buffer is needed here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All graphs share one memory pool, since they never run at the same time, and one stream to warm up and capture
        # on, since libraries keep a workspace per stream.
        self._pool: Any = None
        self._capture_stream: torch.cuda.Stream | None = None

    def staging(self, num_words: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def fetch(self, words: Tensor) -> Fetch:
        """Start the copy, and record an event after it."""
        host = torch.empty(words.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(words, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def wait() -> Words:
            arrived.synchronize()
            fetched: Words = host.numpy()
            return fetched

        return wait

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """Run it twice on a side stream: kernels compile, and libraries allocate workspaces. Then record a graph."""
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        side = self._capture_stream
        side.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):  # around the capture too: when that fails, torch leaves its stream current
            run()
            run()
            # Other threads copy KV blocks at the same time, which must not end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                result = run()
        torch.cuda.current_stream(self._device).wait_stream(side)

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def synchronize(self) -> None:
        """Wait for all launched work."""
        torch.cuda.synchronize(self._device)

    def measure(self, run: Callable[[], object]) -> MeasuredMemory:
        """Run it twice: the first run loads kernels and workspaces, which stay; the second is measured."""
        run()
        self.synchronize()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self._device)
        return MeasuredMemory(device=self.memory(), peak_bytes=peak - before)

    def memory(self) -> DeviceMemory:
        """Return the memory as it is now, without what torch keeps for reuse."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) + _CONTEXT_BYTES
        return DeviceMemory(total_bytes=total, free_bytes=free, process_bytes=held)


@contextmanager
def errors_of_device() -> Iterator[None]:
    """Raise DeviceBroken in place of an error that CUDA repeats at every later call: any but a lack of memory."""
    try:
        yield
    except RuntimeError as error:  # torch.AcceleratorError, from torch 2.8 on
        if not str(error).startswith("CUDA error") or "out of memory" in str(error):
            raise
        raise DeviceBroken(f"cannot use the device any more: {error}") from error


@cache
def device_for(device: torch.device) -> HostDevice:
    """Return the device that a tensor's `device` names."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()
