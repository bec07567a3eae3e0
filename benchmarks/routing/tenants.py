"""Two tenants with equal shares, one ten times as loud as the other."""

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from measure.figures import by_kind, summarize
from measure.simulate.cluster import run
from measure.simulate.comparison import ReplaySettings, load_trace, simulation, trace_arrivals
from measure.simulate.records import Arrival
from measure.simulate.store import ResultFolder, in_processes, write_json
from measure.workload.traces import Trace
from router.tenants import Tenant

LOUDNESS = 10
"""Requests of the loud tenant for each of the quiet one."""
LOUD = Tenant(name="loud", cache_salt="loud")
QUIET = Tenant(name="quiet", cache_salt="quiet")


class Arm(Enum):
    """Senders of a cell, and their accounts."""

    ALONE = "alone"
    """The quiet tenant without the loud one."""
    HALF = "half"
    """The quiet tenant alone on half of the workers, its share."""
    TWO = "two tenants"
    ONE = "one account"
    """The requests of both under one name: what the quiet one gets where nothing tells them apart."""

    @property
    def is_shared(self) -> bool:
        """Whether the loud tenant sends, too."""
        return self in (Arm.TWO, Arm.ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCell:
    """One run of the part."""

    policy: str
    speed: float
    """Speed-up of both tenants' requests together."""
    arm: Arm

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.policy}@{self.speed:g}-{self.arm.value.replace(' ', '-')}"


def tenant_cells(policies: Sequence[str], speeds: Sequence[float], *, ours: str) -> tuple[TenantCell, ...]:
    """Return all cells; half of the workers and a single account are replayed under our policy only."""
    return tuple(
        TenantCell(policy=policy, speed=speed, arm=arm)
        for speed in speeds
        for policy in policies
        for arm in Arm
        if arm in (Arm.ALONE, Arm.TWO) or policy == ours
    )


Values = dict[str, dict[str, float]]
"""Figures of a cell by tenant and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantReplay:
    """Cells of a fleet, and the folder of their results."""

    settings: ReplaySettings
    out: Path

    def run(self, cells: Sequence[TenantCell], *, num_jobs: int) -> Iterator[tuple[TenantCell, Values]]:
        """Run the cells that are not finished; yields all with their figures."""
        ResultFolder(self.out, "cells").claim(self.settings.fingerprint())
        missing = [cell for cell in cells if not self._path(cell).exists()]
        apart = in_processes(self.run_cell, [(cell,) for cell in missing], num_jobs=num_jobs)
        for cell in map(self.run_cell, missing) if num_jobs == 1 else apart:
            print(f"{self.out.name}: {cell.name}", flush=True)
        for cell in cells:
            yield cell, json.loads(self._path(cell).read_text(encoding="utf-8"))

    def run_cell(self, cell: TenantCell) -> TenantCell:
        """Serve the requests of a cell and write its figures. Takes seconds to a minute."""
        settings = self.settings
        if cell.arm is Arm.HALF:
            settings = replace(settings, num_prefill=settings.num_prefill // 2, num_decode=settings.num_decode // 2)
        shape, sim_settings = simulation(settings, cell.policy)
        done = by_kind(run(shape, sim_settings, tenant_arrivals(load_trace(settings), settings, cell)).requests)
        values: Values = {}
        for tenant in (LOUD, QUIET):
            if requests := done.get(tenant.name):
                figures = summarize(requests, slo=settings.slo)
                values[tenant.name] = {"requests": figures.num_requests, "good": figures.good_share}
                if figures.ttft is not None:
                    values[tenant.name] |= {"TTFT_p50_s": figures.ttft.p50, "TTFT_p99_s": figures.ttft.p99}
        write_json(self._path(cell), values)
        return cell

    def _path(self, cell: TenantCell) -> Path:
        return self.out / "cells" / f"{cell.name}.json"


def tenant_arrivals(trace: Trace, settings: ReplaySettings, cell: TenantCell) -> Iterator[Arrival]:
    """Yield the requests of a cell in order; their kinds are the tenants' names."""
    loud, quiet = shared_out(trace)
    share = 1 / (1 + LOUDNESS)
    streams = [_sent_by(QUIET, quiet.faster(cell.speed * share), settings, cell.arm)]
    if cell.arm.is_shared:
        streams.append(_sent_by(LOUD, loud.faster(cell.speed * (1 - share)), settings, cell.arm))
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)


def shared_out(trace: Trace) -> tuple[Trace, Trace]:
    """Return the requests of the loud tenant, and those of the quiet one: the last eleventh, from time 0."""
    num_loud = len(trace.requests) - len(trace.requests) // (1 + LOUDNESS)
    rest = trace.requests[num_loud:]
    quiet = tuple(replace(request, arrival_s=request.arrival_s - rest[0].arrival_s) for request in rest)
    return trace.first(num_loud), replace(trace, requests=quiet)


def _sent_by(tenant: Tenant, trace: Trace, settings: ReplaySettings, arm: Arm) -> Iterator[Arrival]:
    # One account has one name; salts differ all the same, so that caches are equal in both arms.
    sender = replace(tenant, name="both") if arm is Arm.ONE else tenant
    for arrival in trace_arrivals(trace, slo=settings.slo, seed=settings.seed):
        yield replace(arrival, kind=tenant.name, tenant=sender)
