"""Figures of the cells, and the file that keeps them."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from measure.figures import Figures, Percentiles
from measure.simulate.results import SimulationSummary

_DIGITS = 4
"""Significant digits of what is kept."""


class Row(BaseModel):
    """Figures of a cell, or of a tenant's requests in it."""

    model_config = ConfigDict(frozen=True)

    fleet: str
    policy: str
    speed: float
    load: str = ""
    """Stages of its arrivals; empty: the trace's own."""
    arm: str = ""
    tenant: str = ""
    num_requests: int
    num_good: int
    num_bound: int | None = None
    """Most requests that could be good; None: not computed."""
    num_refused: int
    """Requests that were refused, failed or timed out."""
    num_ttft_misses: int
    num_tpot_misses: int
    goodput_per_s: float
    """Good requests per second of arrivals."""
    token_hit: float | None = None
    pulled_share: float | None = None
    hot_spot: float | None = None
    ttft: Percentiles | None
    tpot: Percentiles | None

    @property
    def good_share(self) -> float:
        """Good requests of all requests."""
        return self.num_good / self.num_requests

    @property
    def bound_share(self) -> float | None:
        """Most good requests of all requests; None without a bound."""
        return None if self.num_bound is None else self.num_bound / self.num_requests

    @property
    def ratio(self) -> float | None:
        """Good requests as a share of the bound; None without a bound, 1 where none can be good."""
        if self.num_bound is None:
            return None
        return self.num_good / self.num_bound if self.num_bound else 1.0


class PartResults(BaseModel):
    """Results of a part."""

    settings: dict[str, Any]
    """Settings of its cells, by fleet."""
    rows: tuple[Row, ...]


class Results(BaseModel):
    """Content of the results file; no figure depends on the machine."""

    method: str = "benchmarks/routing/__init__.py"
    parts: dict[str, PartResults] = {}

    def rows(self, part: str) -> tuple[Row, ...]:
        """Return the rows of a part; none if it has not run."""
        return self.parts[part].rows if part in self.parts else ()


def counts(figures: Figures) -> dict[str, Any]:
    """Return the fields of a row that all sets of requests have."""
    return {
        "num_requests": figures.num_requests,
        "num_good": figures.num_good,
        "num_refused": figures.num_not_complete,
        "num_ttft_misses": figures.num_ttft_misses,
        "num_tpot_misses": figures.num_tpot_misses,
        "ttft": _rounded_times(figures.ttft),
        "tpot": _rounded_times(figures.tpot),
    }


def summary_fields(summary: SimulationSummary) -> dict[str, Any]:
    """Return the fields of a row that a whole run has."""
    return counts(summary.figures) | {
        "goodput_per_s": rounded(summary.goodput_per_s),
        "token_hit": rounded(summary.token_hit),
        "pulled_share": rounded(summary.pulled_share),
        "hot_spot": rounded(summary.hot_spot),
    }


def rounded(value: float) -> float:
    """Return a value with as many digits as the file keeps."""
    return float(f"{value:.{_DIGITS}g}")


def _rounded_times(times: Percentiles | None) -> Percentiles | None:
    if times is None:
        return None
    p50, p90, p99 = map(rounded, astuple(times))
    return Percentiles(p50=p50, p90=p90, p99=p99)


def read_results(path: Path) -> Results:
    """Return the results of a file; none for a missing file or one of an older form."""
    if not path.exists():
        return Results()
    return Results(parts=json.loads(path.read_text(encoding="utf-8")).get("parts", {}))


def write_results(path: Path, results: Results) -> None:
    """Write the file, a line for each row."""
    parts = ",\n".join(f"{json.dumps(name)}: {_part_text(part)}" for name, part in results.parts.items())
    path.write_text(f'{{"method": {json.dumps(results.method)},\n"parts": {{\n{parts}\n}}}}\n', encoding="utf-8")


def _part_text(part: PartResults) -> str:
    rows = ",\n".join(f"  {json.dumps(row.model_dump(exclude_defaults=True))}" for row in part.rows)
    settings = ",\n".join(f"  {json.dumps(fleet)}: {json.dumps(each)}" for fleet, each in part.settings.items())
    return f'{{\n "settings": {{\n{settings}\n }},\n "rows": [\n{rows}\n ]\n}}'
