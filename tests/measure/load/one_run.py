"""Runs a load test like the command line: `python -m tests.measure.load.one_run URL DIR`.

Ends early on SIGINT. Prints "started" when requests are about to be sent.
"""

import asyncio
import signal
import sys
from pathlib import Path

from measure.load.run import run_load
from measure.load.spec import LoadSpec
from measure.load.store import RunWriter
from measure.load.targets.interface import TargetInfo, TargetSpec
from tests.measure.load.workloads import open_loop, workload


class _Loud(RunWriter):
    def started(self, spec: LoadSpec, target: TargetInfo) -> None:
        super().started(spec, target)
        sys.stdout.write("started\n")
        sys.stdout.flush()


async def _main(url: str, folder: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    starts_s = [0.01 * i for i in range(3)] + [3600.0]  # it would last an hour
    spec = LoadSpec(
        name="long",
        target=TargetSpec(url=url),
        workload=workload(open_loop(starts_s), duration_s=7200.0),
        processes=2,
    )
    with _Loud(folder) as writer:
        writer.finish((await run_load(spec, writer, stop=stop)).info)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2])))
