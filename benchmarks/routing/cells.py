"""The parts of the benchmark: fleets, policies, speeds, and the cells that they make."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.command import terminal, write_figures
from benchmarks.figures import Figures
from benchmarks.routing.tenants import TenantReplay, tenant_cells
from common.slo import Slo
from measure.simulate.bound import replay_bound
from measure.simulate.comparison import CellResult, PolicyComparison, ReplaySettings
from measure.simulate.policies.registry import GREEDY_PERFECT_SIGNALS
from measure.simulate.report import comparison_table, write_report
from measure.workload.waves import SpeedStage, SpeedStages

OURS = "predictive"
POLICIES = (
    OURS,
    GREEDY_PERFECT_SIGNALS,
    "mooncake",
    "ray_prefix",
    "aibrix",
    "dynamo",
    "dynamo_lmetric",
    "sglang_cache_aware",
    "longest_prefix",
    "llm_d",
    "power_of_two",
    "least_load",
    "round_robin",
    "random",
)
SHEDDING_POLICIES = (OURS, "mooncake", "dynamo_with_forecast", "least_load_with_forecast")
"""Policies that predict their first token, so that they refuse what they would serve late."""
OVERLOAD_POLICIES = (*SHEDDING_POLICIES, "dynamo", "least_load")
OVERLOAD_SPEEDS = (1.0, 2.0, 4.0, 8.0)
TENANT_SPEEDS = (4.0, 8.0)
MIN_GOOD_SHARE = 0.03
"""Share of good requests below which a policy is not replayed at the next speed."""
SQUARE_WAVE = SpeedStages(
    name="square wave", stages=(SpeedStage(length_s=60, speed=0.5), SpeedStage(length_s=60, speed=3))
)
BURST = SpeedStages(
    name="burst",
    # The last stage is longer than the rest of 1,500 requests, so that they have one burst.
    stages=(SpeedStage(length_s=60, speed=1), SpeedStage(length_s=20, speed=8), SpeedStage(length_s=300, speed=1)),
)
_SLO = Slo(ttft_s=2.0, tpot_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """A fleet."""

    name: str
    num_prefill: int
    """0: aggregated."""
    num_decode: int
    max_step_tokens: int
    base_speeds: tuple[float, ...]


FLEETS = (
    Workers(name="4P4D", num_prefill=4, num_decode=4, max_step_tokens=2048, base_speeds=(0.5, 1.0, 1.5)),
    Workers(name="8", num_prefill=0, num_decode=8, max_step_tokens=512, base_speeds=(1.0, 1.5, 2.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Trace, folder of the results, and processes of a run."""

    trace: Path
    num_requests: int
    num_jobs: int
    out: Path

    def settings(self, fleet: Workers, *, shed: str, stages: SpeedStages | None = None) -> ReplaySettings:
        """Return the settings of a fleet's cells."""
        return ReplaySettings(
            trace=self.trace,
            num_requests=self.num_requests,
            num_prefill=fleet.num_prefill,
            num_decode=fleet.num_decode,
            max_step_tokens=fleet.max_step_tokens,
            slo=_SLO,
            shed=shed,
            stages=stages,
        )

    def run(self, comparison: PolicyComparison) -> list[CellResult]:
        """Run the cells that are not finished; returns all. Raises OtherSettings, TraceError, ReplayError."""
        comparison.prepare()
        return comparison.run(num_jobs=self.num_jobs, report=lambda result: print(_line(result), flush=True))

    def write(self, comparison: PolicyComparison, results: Sequence[CellResult]) -> None:
        """Write the table and the page of these results beside the bound, and print the table."""
        speeds = dict.fromkeys(result.cell.speed for result in results)
        bounds = {speed: replay_bound(comparison.settings, speed) for speed in speeds}
        write_report(comparison, results, bounds)
        console = terminal()
        console.print(comparison.out.name)
        console.print(comparison_table(results, bounds))


def _line(result: CellResult) -> str:
    good = f"{100 * result.summary.figures.good_share:.1f} % good, {result.summary.goodput_per_s:.2f}/s"
    return f"{result.cell.name}: {good} ({result.clock.wall_s:.0f} s)"


def base(bench: Bench) -> None:
    """Run every policy at three speeds without refusals."""
    for fleet in FLEETS:
        settings, out = bench.settings(fleet, shed="deadline"), bench.out / f"base-{fleet.name}"
        policies: tuple[str, ...] = POLICIES
        results: list[CellResult] = []
        for speed in fleet.base_speeds:
            comparison = PolicyComparison(settings=settings, policies=policies, speeds=(speed,), out=out)
            found = bench.run(comparison)
            results += found
            policies = holding(found)
        bench.write(comparison, results)


def holding(results: Iterable[CellResult]) -> tuple[str, ...]:
    """Return the policies that are replayed at the next speed."""
    shares = {result.cell.policy: result.summary.figures.good_share for result in results}
    return tuple(policy for policy, share in shares.items() if policy == OURS or share >= MIN_GOOD_SHARE)


def overload(bench: Bench) -> None:
    """Run the policies that refuse up to four times the capacity."""
    for fleet in FLEETS:
        settings, out = bench.settings(fleet, shed="slo"), bench.out / f"overload-{fleet.name}"
        comparison = PolicyComparison(settings=settings, policies=OVERLOAD_POLICIES, speeds=OVERLOAD_SPEEDS, out=out)
        bench.write(comparison, bench.run(comparison))


def waves(bench: Bench) -> None:
    """Run the policies that refuse on loads that come in waves."""
    for stages in (SQUARE_WAVE, BURST):
        for fleet in FLEETS:
            settings = bench.settings(fleet, shed="slo", stages=stages)
            out = bench.out / f"waves-{stages.name.replace(' ', '-')}-{fleet.name}"
            comparison = PolicyComparison(settings=settings, policies=SHEDDING_POLICIES, speeds=(1.0,), out=out)
            bench.write(comparison, bench.run(comparison))


def tenants(bench: Bench) -> None:
    """Run a quiet tenant beside a loud one."""
    figures = Figures()
    for fleet in FLEETS:
        replay = TenantReplay(settings=bench.settings(fleet, shed="slo"), out=bench.out / f"tenants-{fleet.name}")
        cells = tenant_cells(SHEDDING_POLICIES, TENANT_SPEEDS, ours=OURS)
        for cell, found in replay.run(cells, num_jobs=bench.num_jobs):
            case = f"{fleet.name}, {cell.policy} at {cell.speed:g}×, {cell.arm.value}"
            for tenant, values in found.items():
                figures.add("tenants", case, tenant, **values)
    figures.show(terminal())
    write_figures(bench.out / "tenants.json", figures, method="benchmarks/routing/__init__.py")


PARTS: Mapping[str, Callable[[Bench], None]] = MappingProxyType(
    {"overload": overload, "waves": waves, "tenants": tenants, "base": base}
)
"""Parts by name, the longest last."""
