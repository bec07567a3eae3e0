"""A generator process: plays the sessions that it gets and measures itself. `python -m measure.load.process`.

Orders come on stdin, reports go to stdout (`measure.load.wire`), errors to stderr. It ignores SIGINT: its parent
decides when it ends. It ends when stdin does, and dies with its parent.
"""

import asyncio
import gc
import os
import resource
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from common.clock import SystemClock
from common.process import die_with_parent
from measure.load.player import Player, RequestTerms, Tools
from measure.load.records import RequestRecord
from measure.load.selfcheck import SelfMeter
from measure.load.targets.interface import Target, TargetSpec, make_target
from measure.load.wire import (
    GeneratorOrder,
    Report,
    Unpacker,
    from_wire,
    pack,
    to_wire,
)
from measure.workload.content import ContentWriter
from measure.workload.sessions import Session

FLUSH_S = 0.02
"""Time for which reports are gathered: one write for each would wake the other side as often."""
PULSE_S = 0.5


class ReportQueue:
    """Buffers reports and writes them; a `Reporter`."""

    def __init__(self, pipe: asyncio.WriteTransport) -> None:
        self._pipe = pipe
        self._waiting: list[bytes] = []

    def put(self, kind: Report, *values: Any) -> None:
        """Send a report within `FLUSH_S`."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self._waiting.append(pack(kind, *values))

    def flush(self) -> None:
        """Write all buffered reports."""
        if self._waiting:
            self._pipe.write(b"".join(self._waiting))
            self._waiting.clear()

    def record(self, request: RequestRecord) -> None:
        """Report an ended request."""
        self.put(Report.RECORD, to_wire(request))

    def session_over(self, stream: int | None) -> None:
        """Report the end of a session; at once in a closed loop, where a successor is due."""
        self.put(Report.SESSION_OVER, stream)
        if stream is not None:
            self.flush()


async def _serve(orders_fd: int, reports_fd: int) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), os.fdopen(orders_fd, "rb", 0))
    pipe, closing = await loop.connect_write_pipe(_Closing, os.fdopen(reports_fd, "wb", 0))
    outbox = ReportQueue(pipe)
    meter = SelfMeter(SystemClock())
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(meter.run()), tasks.create_task(_pulse(outbox, meter))]
        gc.collect()
        gc.freeze()  # objects from the start live on; scanning them again would only delay the loop
        target = await _execute(orders, outbox, meter, tasks)
        for task in watching:
            task.cancel()
    outbox.put(Report.BYE)
    outbox.flush()
    await target.aclose()
    pipe.close()
    await closing.is_closed.wait()


class _Closing(asyncio.Protocol):
    """Signals that everything written to a pipe has gone into it."""

    def __init__(self) -> None:
        self.is_closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the pipe is closed."""
        self.is_closed.set()


async def _execute(
    orders: asyncio.StreamReader, outbox: ReportQueue, meter: SelfMeter, tasks: asyncio.TaskGroup
) -> Target:
    """Execute orders until FINISH; return the target. Raises EOFError when the parent is gone."""
    unpacker = Unpacker()
    target: Target
    player: Player
    while data := await orders.read(1 << 16):
        for kind, *values in unpacker.feed(data):
            match GeneratorOrder(kind):
                case GeneratorOrder.SETUP:
                    target = make_target(from_wire(TargetSpec, values[0]))
                    outbox.put(Report.READY, _run_before_others())
                    outbox.flush()
                case GeneratorOrder.BEGIN:
                    meter.take()  # getting ready does not count
                    player = _make_player(target, from_wire(RequestTerms, values[0]), outbox, tasks)
                case GeneratorOrder.PLAY:
                    player.play(from_wire(Session, values[0]), values[1])
                    await asyncio.sleep(0)  # writing a prompt takes time; due requests go first
                case GeneratorOrder.STOP:
                    player.stop()
                case GeneratorOrder.FINISH:
                    return target
    raise EOFError("cannot go on: the load test that started this process has ended")


def _make_player(target: Target, terms: RequestTerms, outbox: ReportQueue, tasks: asyncio.TaskGroup) -> Player:
    writer = ContentWriter(seed=terms.seed, first_token=terms.first_token, num_tokens=terms.num_tokens)
    return Player(Tools(target=target, writer=writer, clock=SystemClock()), terms, outbox, tasks)


async def _pulse(outbox: ReportQueue, meter: SelfMeter) -> None:
    while True:
        await asyncio.sleep(PULSE_S)
        outbox.put(Report.PULSE, asdict(meter.take()))


def main() -> None:
    """Serve the load test that started this process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _allow_many_connections()
    orders_fd, reports_fd = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # printed text must not mix with the reports
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    uvloop.run(_serve(orders_fd, reports_fd))


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed: no request may wait for the connection of another."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run_before_others() -> bool:
    """Request real-time scheduling (SCHED_RR) for this process and its later threads; return whether it is allowed.

    On a machine shared with the server, time stamps would otherwise wait tens of milliseconds for the server's time
    slices. Later threads inherit it, gRPC's among them. The generator's CPU use does not grow by it, and the kernel
    reserves others a part of each second (`sched_rt_runtime_us`).
    """
    if not hasattr(os, "sched_setscheduler"):  # Linux only
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


if __name__ == "__main__":
    main()
