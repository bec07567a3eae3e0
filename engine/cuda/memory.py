"""How many bytes of pages fit beside the weights and everything that a step needs.

    total = weights, other processes │ a step at its largest │ graphs   │ reserve │ pages
            not free                 │ measured              │ computed │ stated  │ the rest

Of a card that workers share, each counts its own fraction (`engine.memory`).
"""

from engine.cuda.device import MeasuredMemory
from engine.memory import MemoryShare, device_free_bytes

_GIB = 1 << 30
# The allocator's blocks do not fit every step without gaps.
_STEP_SLACK = 0.2
# Kernels that are loaded late, libraries' workspaces, staging of KV copies, what other processes take later.
_RESERVE_SHARE = 0.02
_MIN_RESERVE_BYTES = _GIB // 2


def kv_bytes_left(largest_step: MeasuredMemory, share: MemoryShare, *, graph_bytes: int) -> int:
    """Return what is left for pages, as measured when the weights were loaded; `graph_bytes` are what graphs keep.

    Raises ValueError when nothing is left.
    """
    free_bytes = device_free_bytes(largest_step.device, share)
    reserve_bytes = max(_MIN_RESERVE_BYTES, round(largest_step.device.total_bytes * _RESERVE_SHARE))
    needed_bytes = round(largest_step.peak_bytes * (1 + _STEP_SLACK)) + graph_bytes + reserve_bytes
    if needed_bytes >= free_bytes:
        raise ValueError(
            f"kv_memory_gib: auto finds no memory for KV pages: of this worker's part of the device"
            f" {free_bytes / _GIB:.1f} GiB are free beside the weights, and steps need {needed_bytes / _GIB:.1f} GiB:"
            " lower max_step_tokens or max_running"
        )
    return free_bytes - needed_bytes
