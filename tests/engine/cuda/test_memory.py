"""Size of the pages from measured memory."""

import pytest
import torch

from engine.cuda.device import MeasuredMemory, device_for
from engine.cuda.loading import StepBounds, kv_bytes_left
from engine.memory import DeviceMemory, MemoryShare
from tests.engine.driver import DEVICE

GIB = 1 << 30


def measured(*, total_gib: int, free_gib: int, peak_gib: int, process_gib: int = 0) -> MeasuredMemory:
    memory = DeviceMemory(total_bytes=total_gib * GIB, free_bytes=free_gib * GIB, process_bytes=process_gib * GIB)
    return MeasuredMemory(device=memory, peak_bytes=peak_gib * GIB)


def test_kv_bytes_left_are_what_is_free_without_steps_graphs_and_reserve() -> None:
    step = measured(total_gib=100, free_gib=80, peak_gib=5)
    assert kv_bytes_left(step, MemoryShare(), graph_bytes=3 * GIB) == (80 - 6 - 3 - 2) * GIB


def test_kv_bytes_left_of_a_shared_card_are_of_the_workers_own_part() -> None:
    step = measured(total_gib=100, free_gib=80, peak_gib=5, process_gib=20)
    assert kv_bytes_left(step, MemoryShare(device_fraction=0.5), graph_bytes=3 * GIB) == (30 - 6 - 3 - 2) * GIB


def test_kv_bytes_left_on_a_small_device_keep_half_a_gib() -> None:
    step = measured(total_gib=8, free_gib=4, peak_gib=0)
    assert kv_bytes_left(step, MemoryShare(), graph_bytes=0) == 4 * GIB - GIB // 2


@pytest.mark.parametrize("free_gib", [0, 5, 11])
def test_kv_bytes_left_when_steps_take_all_say_what_to_lower(free_gib: int) -> None:
    step = measured(total_gib=100, free_gib=free_gib, peak_gib=5)
    with pytest.raises(ValueError, match="lower max_step_tokens or max_running"):
        kv_bytes_left(step, MemoryShare(), graph_bytes=3 * GIB)


def test_measure_runs_the_work_and_finds_memory() -> None:
    runs: list[None] = []
    memory = device_for(torch.device(DEVICE)).measure(lambda: runs.append(None)).device
    assert runs
    assert 0 < memory.free_bytes < memory.total_bytes


@pytest.mark.parametrize(("max_running", "expected"), [(1, 64), (64, 64), (300, 300)])
def test_step_bounds_leave_room_for_all_samples_of_one_prompt(max_running: int, expected: int) -> None:
    assert StepBounds(max_step_tokens=10, max_running=max_running).max_seqs == expected
