"""How long something takes on a device."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_REPETITIONS = 10


def synchronize(device: torch.device) -> None:
    """Wait until everything launched on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(run: Callable[[], object], device: torch.device, *, repetitions: int, warm_up: int = 3) -> float:
    """Return the median time of a call that keeps the device busy for far longer than it takes to launch."""
    for _ in range(warm_up):
        run()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(_wall_s(run) for _ in range(repetitions))
    marks: list[Any] = [_timing_event() for _ in range(repetitions + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    synchronize(device)
    return statistics.median(float(begin.elapsed_time(end)) / 1000 for begin, end in itertools.pairwise(marks))


def graph_s(run: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """Return the time of one call of a short kernel, without what it costs to launch: `calls` of them in a CUDA graph.

    `run` must not wait for the device. On a CPU it is simply called.
    """
    if device.type != "cuda":
        return median_s(run, device, repetitions=_REPETITIONS, warm_up=1)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return median_s(graph.replay, device, repetitions=_REPETITIONS) / calls


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wall_s(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
