"""What a fleet without free pages costs its router while requests of many tenants wait."""

import asyncio
import itertools
import time

from benchmarks.figures import Figures, quantile
from benchmarks.router.in_process import BLOCK_SIZE, join, make_router
from common.ids import RequestId
from kvrelay.v1 import worker_pb2
from router.admission.ticket import QueuedRequest, Ticket
from router.parts import RouterParts
from router.placement.chooser import Search
from router.placement.plans import PlacementRequest
from router.tenants import Tenant, Terms

NUM_WAITING = 600
_NEEDED_BLOCKS = 64
_PATIENCE_S = 1e6


def measure_full_fleet(figures: Figures, *, num_workers: int, num_tenants: int, num_reports: int) -> None:
    """One round: requests come to a full fleet, then its workers report that hardly any page is free."""
    arrivals, reports = asyncio.run(_measure(num_workers, num_tenants, num_reports))
    case = f"{num_workers} workers × {num_tenants} tenants"
    for name, samples in (("arrival", arrivals), ("report", reports)):
        cpu_us = sum(samples) / len(samples)
        figures.add("full", f"{name}, {case}", "kvrelay", CPU_us=cpu_us, CPU_us_p99=quantile(samples, 0.99))


async def _measure(num_workers: int, num_tenants: int, num_reports: int) -> tuple[list[float], list[float]]:
    router = make_router("predictive", max_queued=NUM_WAITING + 1)
    join(router, num_workers, num_blocks=_NEEDED_BLOCKS, num_free_blocks=0)
    for link in asyncio.all_tasks() - {asyncio.current_task()}:
        link.cancel()  # there is no worker behind it
    tenants = [Tenant(name=f"tenant-{number}") for number in range(num_tenants)]
    waiting: list[asyncio.Task[object]] = []
    arrivals = []
    for number, tenant in enumerate(itertools.islice(itertools.cycle(tenants), NUM_WAITING)):
        ticket = router.admission.admit(tenant, Terms())
        assert isinstance(ticket, Ticket), ticket
        waiting.append(asyncio.create_task(router.line.place(_queued(router, ticket, number))))
        started_s = time.thread_time()
        await asyncio.sleep(0)
        arrivals.append((time.thread_time() - started_s) * 1e6)
    reports = []
    for number, member in enumerate(itertools.islice(itertools.cycle(router.fleet.members), num_reports)):
        report = worker_pb2.LoadReport(num_free_blocks=number % 8, num_blocks=_NEEDED_BLOCKS)
        update = worker_pb2.WatchWorkerResponse(seq=1 + number // num_workers, load=report)
        started_s = time.thread_time()
        router.fleet.on_update(member, update)
        reports.append((time.thread_time() - started_s) * 1e6)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await router.fleet.aclose()
    return arrivals, reports


def _queued(router: RouterParts, ticket: Ticket, number: int) -> QueuedRequest:
    request = PlacementRequest(
        request_id=RequestId(f"req-{number}"), num_tokens=_NEEDED_BLOCKS * BLOCK_SIZE, block_size=BLOCK_SIZE
    )
    deadline_s = router.clock.monotonic() + _PATIENCE_S
    return QueuedRequest(ticket=ticket, search=Search(request=request), deadline_s=deadline_s)
