"""What a tier that writes without a pause costs the answers of its worker.

    python -m benchmarks.tier_decode [--rounds 6] [--sequences 8] [--json FILE]

Method. The default model with pages of the pool's dtype decodes some sequences at once with two threads, step by step,
in this process. In every other turn of `_TURN_S` seconds a worker's tiers (`worker/worker_tiers.py`) write blocks to a
disk tier as fast as they may beside a busy engine: more are always offered than they get written. Times are those of
steps; a turn's first steps are left out. What is written is random pages of the pool under new names.
"""

import asyncio
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn, quantile
from common.clock import SystemClock
from common.config import TiersConfig, parse_config
from common.ids import BlockHash, BlockId, HashRoot
from common.kv_events import NO_EVENTS
from common.sampling import SamplingParams
from engine.core import EngineCore
from engine.events import StepReport
from engine.executor import Executor
from engine.published import PublishedBlock
from tests.builders import make_request
from worker.factory import limits_for, load_executor_for
from worker.read_gate import ReadGate
from worker.timing import WorkerTiming
from worker.worker_tiers import WorkerTiers, open_tiers

_TURN_S = 5.0
_NUM_WARM_UP = 5
_OFFERED = 64
_ROOT = HashRoot(os.urandom(32))


def main() -> int:
    """Measure and print."""
    parser = command_line("tier_decode", __doc__, rounds=6)
    parser.add_argument("--sequences", type=int, default=8)
    args, figures = parser.parse_args(), Figures()
    config = parse_config({"pools": {"decode": {"threads": 2, "kv_memory_gib": 0.5}}}, source="benchmark")
    executor, _tokenizer = load_executor_for(config, config.pools.decode)
    with TemporaryDirectory() as folder:
        tiers = TiersConfig(disk_gib=2, path=Path(folder) / "tier")
        for number in range(args.rounds):
            for arm in in_turn(("without", "writing"), number):
                core = EngineCore(executor, limits_for(config.pools.decode), SystemClock())
                lives = core.report_published()
                assert lives is not None, "the default model has no window pages"
                if arm == "without":
                    times_s, num_written = _decode(core, args.sequences), 0
                else:
                    with _writing(tiers, executor, lives) as worker_tiers:
                        times_s = _decode(core, args.sequences)
                        num_written = sum(each.writes for each in worker_tiers.tiers.stats().tiers.values())
                figures.add(
                    "steps",
                    f"{args.sequences} sequences",
                    arm,
                    median_ms=quantile(times_s, 0.5) * 1e3,
                    p99_ms=quantile(times_s, 0.99) * 1e3,
                    MB_written_per_s=num_written * executor.kv.shape.block_bytes / _TURN_S / 1e6,
                )
    write_figures(args.json, figures, method="benchmarks/tier_decode.py", sequences=args.sequences)
    figures.show(terminal(), base="without")
    return 0


def _decode(core: EngineCore, num_sequences: int) -> list[float]:
    """Return the seconds of each step of a turn."""
    block_size = core.scheduler.limits.block_size
    for idx in range(num_sequences):
        request = make_request([idx + 5] * 32, block_size=block_size)
        sampling = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
        core.add(replace(request, sampling=sampling), lambda _event: None)
    times_s: list[float] = []
    end_s = time.monotonic() + _TURN_S
    while time.monotonic() < end_s:
        began_s = time.perf_counter()
        core.step()
        times_s.append(time.perf_counter() - began_s)
        core.report()
    return times_s[_NUM_WARM_UP:]


@contextmanager
def _writing(config: TiersConfig, executor: Executor, lives: "array[int]") -> Iterator[WorkerTiers]:
    """Write to tiers during the block, from an event loop of their own, as a worker does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="events")
    thread.start()
    opened = open_tiers(config, executor.kv.shape)
    assert opened is not None, "the disk tier is on"
    limits = limits_for(parse_config({}, source="benchmark").pools.decode)
    load = replace(EngineCore(executor, limits, SystemClock()).load(), num_running=1)

    timing = WorkerTiming(max_step_tokens=1, clock=SystemClock())

    async def begin() -> WorkerTiers:
        tiers = WorkerTiers(
            opened,
            store=executor.kv,
            lives=lives,
            clock=SystemClock(),
            on_changes=lambda _events: None,
            gate=ReadGate(lambda: timing, backlog_s=lambda: 0.0, token_bytes=1.0, clock=SystemClock()),
        )
        tiers.start()
        return tiers

    async def offer() -> None:
        while True:
            if tiers.writes.num_waiting < _OFFERED:
                tiers.take(StepReport(kv_events=NO_EVENTS, load=load, published=tuple(map(_block, range(_OFFERED)))))
            await asyncio.sleep(0.005)

    def _block(block_id: int) -> PublishedBlock:
        name = BlockHash(os.urandom(16))
        return PublishedBlock(block_id=BlockId(block_id), life=lives[block_id], block_hash=name, root=_ROOT)

    tiers = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    offering = asyncio.run_coroutine_threadsafe(offer(), loop)
    try:
        yield tiers
    finally:
        offering.cancel()
        asyncio.run_coroutine_threadsafe(tiers.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    sys.exit(main())
