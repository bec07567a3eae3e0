"""From samples to the table and the JSON file."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cases import Case
from benchmarks.engine.floors import ModelCost
from benchmarks.engine.measure import Measured, Sample
from benchmarks.peers.process import Arm

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
_SPINS_CPU_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm at one case, over all rounds."""

    arm: str
    median: float
    """Tokens per second."""
    low: float
    high: float
    of_floor: float
    """Share of what the machine could do at best, median of the rounds."""
    ttft_s: float
    """Median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """One line of the table."""

    case: str
    best_tokens_per_s: float
    arms: tuple[ArmSummary, ...]
    ratio: float | None
    """First arm to second: median of the rounds' own ratios; None without a peer."""
    ratio_low: float | None
    ratio_high: float | None
    agreement: float | None
    """Share of tokens that both arms chose before their first difference."""


def summarize(measured: Measured, cases: Sequence[Case], arms: Sequence[str], cost: ModelCost) -> list[CaseSummary]:
    """Return a line per case. Each round is held against what the machine could do in that round."""
    return [_summary(measured, case, arms, cost) for case in cases]


def _summary(measured: Measured, case: Case, arms: Sequence[str], cost: ModelCost) -> CaseSummary:
    floors = {
        rated.round_idx: cost.best_tokens_per_s(case, rated.rates)
        for rated in measured.rates
        if rated.case == case.name
    }
    groups = {arm: [s for s in measured.samples if s.case == case.name and s.arm == arm] for arm in arms}
    ratios: list[float] = []
    if len(arms) > 1:
        pairs = zip(groups[arms[0]], groups[arms[1]], strict=True)
        ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs]
    agreed = [agreement.tokens for agreement in measured.agreements if agreement.case == case.name]
    return CaseSummary(
        case=case.name,
        best_tokens_per_s=statistics.median(floors.values()),
        arms=tuple(_arm_summary(arm, group, floors) for arm, group in groups.items()),
        ratio=statistics.median(ratios) if ratios else None,
        ratio_low=min(ratios) if ratios else None,
        ratio_high=max(ratios) if ratios else None,
        agreement=statistics.mean(agreed) if agreed else None,
    )


def _arm_summary(arm: str, group: Sequence[Sample], floors: Mapping[int, float]) -> ArmSummary:
    values = [sample.tokens_per_s for sample in group]
    return ArmSummary(
        arm=arm,
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        of_floor=statistics.median(sample.tokens_per_s / floors[sample.round_idx] for sample in group),
        ttft_s=statistics.median(sample.ttft_s for sample in group),
    )


def print_table(lines: Sequence[CaseSummary], measured: Measured, console: Console) -> None:
    """Print tokens per second with their range, the ratio, and what of the floor each arm reaches."""
    reads = [rated.rates.read_bytes_per_s / 1e9 for rated in measured.rates]
    products = [rated.rates.bf16_flops / 1e12 for rated in measured.rates]
    table = Table(
        title="tokens per second, median (range); the machine reads"
        f" {statistics.median(reads):.0f} ({min(reads):.0f}–{max(reads):.0f}) GB/s and multiplies"
        f" {statistics.median(products):.2f} ({min(products):.2f}–{max(products):.2f}) TFLOP/s"
    )
    table.add_column("case")
    for summary in lines[0].arms:
        table.add_column(summary.arm, justify="right")
        table.add_column("of the floor", justify="right")
    table.add_column("ratio (range)", justify="right")
    table.add_column("same tokens", justify="right")
    for line in lines:
        cells = [line.case]
        for summary in line.arms:
            cells.append(f"{summary.median:.0f} ({summary.low:.0f}–{summary.high:.0f})")
            cells.append(f"{summary.of_floor:.0%}")
        ratio = f"{line.ratio:.2f} ({line.ratio_low:.2f}–{line.ratio_high:.2f})" if line.ratio is not None else ""
        agreement = f"{line.agreement:.0%}" if line.agreement is not None else ""
        table.add_row(*cells, ratio, agreement)
    console.print(table)


def spinning_arms(measured: Measured) -> list[str]:
    """Return a sentence for every arm during whose turns the others did not rest."""
    found = []
    for arm in sorted({sample.arm for sample in measured.samples}):
        turns = [sample for sample in measured.samples if sample.arm == arm]
        share = sum(sample.idle_cpu_s for sample in turns) / sum(sample.total_s for sample in turns)
        if share > _SPINS_CPU_SHARE:
            found.append(f"while {arm} computed, the waiting arm used {share:.0%} of a core: the run is disturbed")
    return found


def write_json(path: Path, measured: Measured, lines: Sequence[CaseSummary], arms: Sequence[Arm], method: str) -> None:
    """Write everything: method, machine, arms, summary, and every sample."""
    document: dict[str, Any] = {
        "method": method,
        "machine": machine(),
        "arms": {arm.name: arm.about for arm in arms},
        "summary": [asdict(line) for line in lines],
        "samples": [asdict(sample) for sample in measured.samples],
        "agreements": [asdict(agreement) for agreement in measured.agreements],
        "rates": [asdict(rates) for rates in measured.rates],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, instruction sets."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
