"""The parts of the benchmark: fleets, policies, speeds, and the cells that they make."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.routing.rows import PartResults, Row, summary_fields
from benchmarks.routing.tenants import TenantCell, TenantReplay, tenant_cells
from common.slo import Slo
from measure.simulate.bound import Bound, replay_bound
from measure.simulate.comparison import CellResult, PolicyComparison, ReplaySettings
from measure.simulate.policies.registry import GREEDY_PERFECT_SIGNALS
from measure.simulate.report import write_report
from measure.simulate.store import ResultFolder, write_json
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
CAPACITY_SPEED = 2.0
"""Speed at which the trace's work is just below what eight workers do."""
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
    """Trace, folder of the finished cells, and processes of a run."""

    trace: Path
    num_requests: int
    num_jobs: int
    out: Path
    report: Callable[[str], None]

    def claim(self) -> None:
        """Claim the folder. Raises OtherSettings for results of other requests, OSError."""
        values = self.settings(FLEETS[0], shed="none").fingerprint()
        ResultFolder(self.out).claim({name: values[name] for name in ("trace", "num_requests")})

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

    def compare(self, name: str, fleet: Workers, comparison: PolicyComparison) -> Iterator[Row]:
        """Run the cells that are not finished, write their page, and yield the rows of all."""
        stages = comparison.settings.stages
        load = "" if stages is None else stages.name
        comparison.prepare()
        results = comparison.run(num_jobs=self.num_jobs, report=lambda result: self.report(f"{name}: {_line(result)}"))
        bounds = {speed: self._bound(comparison.settings, fleet, speed) for speed in comparison.speeds}
        write_report(comparison, results, bounds)
        for result in results:
            yield Row(
                fleet=fleet.name,
                policy=result.cell.policy,
                speed=result.cell.speed,
                load=load,
                num_bound=bounds[result.cell.speed].num_good,
                **summary_fields(result.summary),
            )

    def _bound(self, settings: ReplaySettings, fleet: Workers, speed: float) -> Bound:
        """Return the bound at a speed, which all parts share: no bound depends on refusals."""
        load = "" if settings.stages is None else settings.stages.name
        path = self.out / "bounds.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        key = f"{fleet.name} {load}@{speed:g}"
        if key not in known:
            known[key] = asdict(replay_bound(settings, speed))
            write_json(path, known)
        return Bound(**known[key])


def _line(result: CellResult) -> str:
    return (
        f"{result.cell.name}: {100 * result.summary.figures.good_share:.1f} % good,"
        f" {result.summary.goodput_per_s:.2f}/s ({result.clock.wall_s:.0f} s)"
    )


def base(bench: Bench) -> PartResults:
    """Run every policy at three speeds without refusals."""
    settings = {fleet.name: bench.settings(fleet, shed="deadline") for fleet in FLEETS}
    rows: list[Row] = []
    for fleet in FLEETS:
        name = f"base-{fleet.name}"
        policies: tuple[str, ...] = POLICIES
        for speed in fleet.base_speeds:
            comparison = PolicyComparison(
                settings=settings[fleet.name], policies=policies, speeds=(speed,), out=bench.out / name
            )
            found = list(bench.compare(name, fleet, comparison))
            rows += found
            policies = holding(found)
    return _part(settings, rows)


def holding(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the policies that are replayed at the next speed."""
    return tuple(row.policy for row in rows if row.policy == OURS or row.good_share >= MIN_GOOD_SHARE)


def overload(bench: Bench) -> PartResults:
    """Run the policies that refuse up to four times the capacity."""
    settings = {fleet.name: bench.settings(fleet, shed="slo") for fleet in FLEETS}
    rows: list[Row] = []
    for fleet in FLEETS:
        name = f"overload-{fleet.name}"
        comparison = PolicyComparison(
            settings=settings[fleet.name], policies=OVERLOAD_POLICIES, speeds=OVERLOAD_SPEEDS, out=bench.out / name
        )
        rows += bench.compare(name, fleet, comparison)
    return _part(settings, rows)


def waves(bench: Bench) -> PartResults:
    """Run the policies that refuse on loads that come in waves."""
    settings: dict[str, ReplaySettings] = {}
    rows: list[Row] = []
    for stages in (SQUARE_WAVE, BURST):
        for fleet in FLEETS:
            name = f"waves-{stages.name.replace(' ', '-')}-{fleet.name}"
            replayed = settings[f"{fleet.name} {stages.name}"] = bench.settings(fleet, shed="slo", stages=stages)
            comparison = PolicyComparison(
                settings=replayed, policies=SHEDDING_POLICIES, speeds=(1.0,), out=bench.out / name
            )
            rows += bench.compare(name, fleet, comparison)
    return _part(settings, rows)


def tenants(bench: Bench) -> PartResults:
    """Run a quiet tenant beside a loud one."""
    settings = {fleet.name: bench.settings(fleet, shed="slo") for fleet in FLEETS}
    rows: list[Row] = []
    for fleet in FLEETS:
        replay = TenantReplay(fleet=fleet.name, settings=settings[fleet.name], out=bench.out / f"tenants-{fleet.name}")
        cells = tenant_cells(SHEDDING_POLICIES, TENANT_SPEEDS, ours=OURS)

        def tell(cell: TenantCell, replay: TenantReplay = replay) -> None:
            bench.report(f"{replay.out.name}: {cell.name}")

        rows += replay.run(cells, num_jobs=bench.num_jobs, report=tell)
    return _part(settings, rows)


def _part(settings: Mapping[str, ReplaySettings], rows: Iterable[Row]) -> PartResults:
    return PartResults(settings={name: each.fingerprint() for name, each in settings.items()}, rows=tuple(rows))


PARTS: Mapping[str, Callable[[Bench], PartResults]] = MappingProxyType(
    {"overload": overload, "waves": waves, "tenants": tenants, "base": base}
)
"""Parts by name, the longest last."""
