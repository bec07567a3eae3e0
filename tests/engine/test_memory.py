"""KV memory of hosts and devices from measured figures."""

import mmap

import pytest
import torch

from engine.cuda.loading import StepBounds, kv_bytes_left, largest_spans
from engine.device.devices import MeasuredMemory, device_for
from engine.device.memory import (
    DeviceMemory,
    HostMemory,
    MemoryShare,
    NoRoomForPages,
    device_free_bytes,
    host_kv_bytes,
    measure_host,
)
from tests.engine.driver import DEVICE

GIB = 1 << 30


def make_host(*, available_gib: float = 12, process_gib: float = 1) -> HostMemory:
    return HostMemory(available_bytes=int(available_gib * GIB), process_bytes=int(process_gib * GIB))


def make_device(*, total_gib: int = 80, free_gib: int = 60, process_gib: int = 16) -> DeviceMemory:
    return DeviceMemory(total_bytes=total_gib * GIB, free_bytes=free_gib * GIB, process_bytes=process_gib * GIB)


# ── pages from figures ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("memory", "share", "expected_gib"),
    [
        pytest.param(make_host(), MemoryShare(host_bytes=5 * GIB), 2, id="half of its part less its own use"),
        pytest.param(
            make_host(available_gib=15, process_gib=1),
            MemoryShare(host_fraction=0.25),
            1.5,
            id="without a part: of its fraction of what is there without itself",
        ),
        pytest.param(
            make_host(), MemoryShare(host_bytes=5 * GIB, reserved_bytes=GIB), 1.5, id="without what a draft model takes"
        ),
        pytest.param(
            make_host(available_gib=2), MemoryShare(host_bytes=9 * GIB), 1, id="never of more than what is free"
        ),
    ],
)
def test_host_kv_bytes_are_half_of_its_part(memory: HostMemory, share: MemoryShare, expected_gib: float) -> None:
    assert host_kv_bytes(memory, share) == expected_gib * GIB


def test_host_when_the_process_outgrew_its_part_says_so() -> None:
    with pytest.raises(NoRoomForPages, match=r"part of the host is 1\.0 GiB, it uses 2\.0 GiB already"):
        host_kv_bytes(make_host(process_gib=2), MemoryShare(host_bytes=GIB))


@pytest.mark.parametrize(("free_gib", "fraction", "expected_gib"), [(60, 1.0, 60), (60, 0.5, 40 - 16), (10, 0.5, 10)])
def test_device_free_bytes_are_the_rest_of_the_part_and_at_most_what_is_free(
    free_gib: int, fraction: float, expected_gib: int
) -> None:
    assert (
        device_free_bytes(make_device(free_gib=free_gib), MemoryShare(device_fraction=fraction)) == expected_gib * GIB
    )


def test_measure_host_counts_this_process() -> None:
    num_bytes = 64 << 20
    before = measure_host()
    # Pages of its own: the heap of a process that ran other tests has this much to spare.
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block[:: mmap.PAGESIZE] = bytes(num_bytes // mmap.PAGESIZE)
        after = measure_host()

    assert after.process_bytes - before.process_bytes >= num_bytes * 0.9


def measured(*, total_gib: int, free_gib: int, peak_gib: int, process_gib: int = 0) -> MeasuredMemory:
    memory = make_device(total_gib=total_gib, free_gib=free_gib, process_gib=process_gib)
    return MeasuredMemory(device=memory, peak_bytes=peak_gib * GIB)


@pytest.mark.parametrize(
    ("step", "fraction", "graph_gib", "expected_gib"),
    [
        pytest.param(
            measured(total_gib=100, free_gib=80, peak_gib=5), 1.0, 3, 80 - 6 - 3 - 2, id="step, graphs, reserve"
        ),
        pytest.param(
            measured(total_gib=100, free_gib=80, peak_gib=5, process_gib=20), 0.5, 3, 30 - 6 - 3 - 2, id="shared card"
        ),
        pytest.param(measured(total_gib=8, free_gib=4, peak_gib=0), 1.0, 0, 3.5, id="half a GiB on a small device"),
    ],
)
def test_kv_bytes_left_are_the_workers_free_memory_less_its_other_needs(
    step: MeasuredMemory, fraction: float, graph_gib: int, expected_gib: float
) -> None:
    left = kv_bytes_left(step, MemoryShare(device_fraction=fraction), graph_bytes=graph_gib * GIB)
    assert left == expected_gib * GIB


@pytest.mark.parametrize("free_gib", [0, 5, 11])
def test_kv_bytes_left_when_steps_take_all_say_what_to_lower(free_gib: int) -> None:
    step = measured(total_gib=100, free_gib=free_gib, peak_gib=5)
    with pytest.raises(NoRoomForPages, match="lower max_step_tokens or max_running"):
        kv_bytes_left(step, MemoryShare(), graph_bytes=3 * GIB)


def test_measure_runs_the_work_and_finds_memory() -> None:
    runs: list[None] = []
    memory = device_for(torch.device(DEVICE)).measure(lambda: runs.append(None)).device
    assert runs
    assert 0 < memory.free_bytes < memory.total_bytes


@pytest.mark.parametrize(("max_running", "expected"), [(1, 64), (64, 64), (300, 300)])
def test_step_bounds_leave_room_for_all_samples_of_one_prompt(max_running: int, expected: int) -> None:
    assert StepBounds(max_step_tokens=10, max_running=max_running).max_seqs == expected


@pytest.mark.parametrize(
    ("max_step_tokens", "max_model_len", "is_behind_prefix", "expected"),
    [
        (2500, 1000, False, [(0, 1000), (0, 1000), (0, 500)]),
        (2000, 1000, False, [(0, 1000), (0, 1000)]),
        (100, 1000, True, [(900, 100)]),
        (1100, 1000, True, [(16, 984), (884, 116)]),
        (3, 1, True, [(0, 1)] * 3),
    ],
)
def test_memory_is_measured_with_a_prefix_where_attention_needs_more_behind_one(
    max_step_tokens: int, max_model_len: int, is_behind_prefix: bool, expected: list[tuple[int, int]]
) -> None:
    spans = largest_spans(max_step_tokens, max_model_len, block_size=16, is_behind_prefix=is_behind_prefix)
    assert [(span.num_computed, span.num_new_tokens) for span in spans] == expected
    assert all(16 * len(span.block_table) >= span.num_computed + span.num_new_tokens for span in spans)
