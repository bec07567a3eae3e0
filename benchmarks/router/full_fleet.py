"""CPU time that a full fleet costs its router while requests of many tenants wait."""

import asyncio
import itertools
import time
from collections.abc import Callable

from benchmarks.figures import Figures, quantile
from benchmarks.router.in_process import BLOCK_SIZE, join, make_router
from common.ids import RequestId
from common.timing import GUESSED_TIMING, StepModel, TimingModel, timing_to_proto
from kvrelay.v1 import worker_pb2
from router.line.wait import Wait
from router.parts import RouterParts
from router.placement.plans import PlacementRequest
from router.record.ticket import Ticket
from router.tenants import Tenant, Terms

NUM_WAITING = 600
_NEEDED_BLOCKS = 64
_NUM_BLOCKS = 10_000
_PATIENCE_S = 1e6
_TPOT_SLO_S = 0.03
_TIMING = TimingModel(
    prefill=GUESSED_TIMING.prefill,
    decode=StepModel(constant_s=0.02, per_decode_s=0.001, num_samples=50),
    max_step_tokens=GUESSED_TIMING.max_step_tokens,
)


def without_pages(number: int) -> worker_pb2.WatchWorkerResponse:
    """Return the report of a worker that has fewer free pages than any request needs."""
    return worker_pb2.WatchWorkerResponse(
        load=worker_pb2.LoadReport(num_free_blocks=number % 8, num_blocks=_NUM_BLOCKS),
    )


def with_slow_steps(number: int) -> worker_pb2.WatchWorkerResponse:
    """Return the report of a worker whose steps take longer than the objective of any request allows."""
    num_decodes = 20 + number % 8
    return worker_pb2.WatchWorkerResponse(
        load=worker_pb2.LoadReport(
            num_running=num_decodes, num_decoding=num_decodes, num_free_blocks=_NUM_BLOCKS // 2, num_blocks=_NUM_BLOCKS
        ),
        timing=timing_to_proto(_TIMING, {}),
    )


FULL_OF = {"pages": without_pages, "answers": with_slow_steps}


def measure_full_fleet(figures: Figures, *, num_workers: int, num_tenants: int, num_reports: int, full_of: str) -> None:
    """One round: requests come to a full fleet, then its workers report that they are still full."""
    arrivals, reports = asyncio.run(_measure(num_workers, num_tenants, num_reports, FULL_OF[full_of]))
    case = f"full of {full_of}, {num_workers} workers × {num_tenants} tenants"
    for name, samples in (("arrival", arrivals), ("report", reports)):
        cpu_us = sum(samples) / len(samples)
        figures.add("full", f"{name}, {case}", "kvrelay", CPU_us=cpu_us, CPU_us_p99=quantile(samples, 0.99))


async def _measure(
    num_workers: int, num_tenants: int, num_reports: int, report: Callable[[int], worker_pb2.WatchWorkerResponse]
) -> tuple[list[float], list[float]]:
    router = make_router("predictive", max_queued=NUM_WAITING + 1)
    join(router, num_workers, num_blocks=_NUM_BLOCKS, num_free_blocks=0)
    for link in asyncio.all_tasks() - {asyncio.current_task()}:
        link.cancel()  # there is no worker behind it
    for member in router.fleet.members:
        router.fleet.on_update(member, _numbered(report(0), 1))
    tenants = [Tenant(name=f"tenant-{number}") for number in range(num_tenants)]
    waiting: list[asyncio.Task[object]] = []
    arrivals = []
    for number, tenant in enumerate(itertools.islice(itertools.cycle(tenants), NUM_WAITING)):
        ticket = router.admission.admit(tenant, Terms())
        assert isinstance(ticket, Ticket), ticket
        waiting.append(asyncio.create_task(router.line.place(_wait(router, ticket, number))))
        started_s = time.thread_time()
        await asyncio.sleep(0)
        arrivals.append((time.thread_time() - started_s) * 1e6)
    reports = []
    for number, member in enumerate(itertools.islice(itertools.cycle(router.fleet.members), num_reports)):
        update = _numbered(report(number), 2 + number // num_workers)
        started_s = time.thread_time()
        router.fleet.on_update(member, update)
        reports.append((time.thread_time() - started_s) * 1e6)
    assert not any(task.done() for task in waiting), "a request got a plan, or a final refusal"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await router.fleet.aclose()
    return arrivals, reports


def _numbered(update: worker_pb2.WatchWorkerResponse, seq: int) -> worker_pb2.WatchWorkerResponse:
    update.seq = seq
    return update


def _wait(router: RouterParts, ticket: Ticket, number: int) -> Wait:
    request = PlacementRequest(
        request_id=RequestId(f"req-{number}"),
        num_tokens=_NEEDED_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        tpot_slo_s=_TPOT_SLO_S,
    )
    return Wait(ticket=ticket, request=request, patience_ends_s=router.clock.monotonic() + _PATIENCE_S)
