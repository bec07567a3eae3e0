"""Share of each kernel in a decode step, and what a step costs the host.

    python -m benchmarks.cuda.profile [--model qwen3-8b] [--device cuda] [--out DIR] [--smoke]

Method. Decode as in `speed`. Host: time within `Executor.launch`, which never waits, and within the rest of a step but
for the wait for results; the step's time beside it, without a profiler. Kernels: 8 steps under torch's profiler, which
slows the host but no kernel; a kernel's share of the time of all. On a CPU, torch's operators take their place.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cuda.arms import BLOCK_SIZE, Arm, EngineArm, Format, largest_model
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Reading
from common.random_models import CONFIGS
from engine.executor import ScheduledSequence, StepHandle, StepResult

_NUM_WARM_UP_STEPS = 8
_NUM_TIMED_STEPS = 32
_NUM_PROFILED_STEPS = 8
_MOST_KERNELS = 12
_FULL = ((1, 1024), (32, 1024))
_SMOKE = ((2, 33),)


@dataclass(slots=True)
class _Clock:
    """Time that an executor takes, split at the seam to the device."""

    launch_s: float = 0.0
    wait_s: float = 0.0


def measure(part: Part, model: str) -> None:
    """Measure decode steps of two batch sizes."""
    cases, arm = _SMOKE if part.is_smoke else _FULL, Arm(model=model, format=Format.BF16)
    most, longest = max(batch for batch, _ in cases), max(context for _, context in cases)
    num_blocks = 2 * most * -(-(longest + 128) // BLOCK_SIZE)
    config = arm.serving_config(part.device, num_blocks=num_blocks, max_running=most, max_step_tokens=max(most, 256))
    engine = EngineArm(config)
    engine.fill_pages()
    clock = _watch(engine)
    for batch, context in cases:
        case = f"{arm.name}, decode {batch} x {context}"
        if part.has_time(case):
            with part.case(case):
                _measure_decode(part, engine, clock, case, batch, context)


def _watch(engine: EngineArm) -> _Clock:
    """Let a clock run while the engine launches steps and waits for them."""
    clock, launch = _Clock(), engine.executor.launch

    def timed_launch(batch: Sequence[ScheduledSequence]) -> StepHandle:
        started_s = time.perf_counter()
        handle = launch(batch)
        clock.launch_s += time.perf_counter() - started_s
        return _TimedHandle(handle, clock)

    setattr(engine.executor, "launch", timed_launch)  # noqa: B010 - mypy takes it for a method
    return clock


@dataclass(frozen=True, slots=True)
class _TimedHandle:
    """A `StepHandle` whose waits are timed."""

    _handle: StepHandle
    _clock: _Clock

    def choose(self) -> None:
        started_s = time.perf_counter()
        self._handle.choose()
        self._clock.launch_s += time.perf_counter() - started_s

    def results(self) -> list[StepResult]:
        started_s = time.perf_counter()
        results = self._handle.results()
        self._clock.wait_s += time.perf_counter() - started_s
        return results


def _measure_decode(part: Part, engine: EngineArm, clock: _Clock, case: str, batch: int, context: int) -> None:
    num_steps = _NUM_WARM_UP_STEPS + _NUM_TIMED_STEPS + _NUM_PROFILED_STEPS
    groups = [engine.add_decoding(context, max_tokens=num_steps + 8) for _ in range(batch)]
    try:
        for _ in range(_NUM_WARM_UP_STEPS):
            engine.step()
        clock.launch_s = clock.wait_s = 0.0
        started_s = time.perf_counter()
        for _ in range(_NUM_TIMED_STEPS):
            engine.step()
        elapsed_s = time.perf_counter() - started_s
        rest_s = elapsed_s - clock.launch_s - clock.wait_s
        note = f"of a step of {1e6 * elapsed_s / _NUM_TIMED_STEPS:.0f} us"
        for name, host_s in (("launch", clock.launch_s), ("plan and take results", rest_s)):
            value = 1e6 * host_s / _NUM_TIMED_STEPS
            part.add(Reading(case=f"{case}, host: {name}", value=value, unit="us", note=note))
        is_cuda = part.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiled:
            for _ in range(_NUM_PROFILED_STEPS):
                engine.step()
            if is_cuda:
                torch.cuda.synchronize(part.device)
    finally:
        engine.cancel(groups)
    _report_kernels(part, case, profiled.key_averages())


def _report_kernels(part: Part, case: str, events: Sequence[Any]) -> None:
    field = "self_device_time_total" if part.device.type == "cuda" else "self_cpu_time_total"
    times_us = {event.key: (getattr(event, field), event.count) for event in events if getattr(event, field) > 0}
    total_us = sum(time_us for time_us, _count in times_us.values())
    if not total_us:
        raise AssertionError("the profiler has seen no kernel")
    for name, (time_us, count) in sorted(times_us.items(), key=lambda item: -item[1][0])[:_MOST_KERNELS]:
        note = f"{count / _NUM_PROFILED_STEPS:g} a step, {time_us / _NUM_PROFILED_STEPS:.0f} us together"
        part.add(Reading(case=f"{case}, {name[:60]}", value=100 * time_us / total_us, unit="% of kernels", note=note))


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = part_parser("profile", __doc__)
    parser.add_argument("--model", choices=list(CONFIGS), help="a random model's name; default: what fits")
    args = parser.parse_args(argv)
    title = "Where a decode step's time goes"
    return run_part("profile", title, args, lambda part: measure(part, args.model or largest_model(part.device)))


if __name__ == "__main__":
    sys.exit(main())
