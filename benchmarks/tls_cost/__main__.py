"""Runs the parts and reports; the method is in the package's docstring."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

import benchmarks.tls_cost as this
from benchmarks.command import command_line, machine, terminal, write_json
from benchmarks.figures import Figures, spread
from benchmarks.tls_cost.arms import OFF, ON
from benchmarks.tls_cost.connections import measure_connections
from benchmarks.tls_cost.kv import measure_kv
from benchmarks.tls_cost.latency import FAKE, SMOLLM2, measure_latency
from benchmarks.tls_cost.router_cpu import Watch, measure_grpc_requests, measure_http_requests, measure_tokens
from benchmarks.tls_cost.signatures import measure_signatures
from benchmarks.token_streams import NUM_STREAMS

PARTS = ("latency", "tokens", "requests", "kv", "parts")


LATENCY_TURNS = 5
"""Rounds of the latency part for each of another part: many short ones, since other work comes and goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured."""

    num_rounds: int
    share: float
    """The share of requests and calls that a round makes; 1 is the full extent."""
    window_s: float
    num_streams: int
    num_pages: int
    """Pages of each pull."""
    has_model: bool
    """Whether SmolLM2 is measured, too."""

    def part(self, count: int) -> int:
        """Return so many requests or calls, or the share of them."""
        return max(8, int(self.share * count))


FULL = Extent(num_rounds=7, share=1.0, window_s=4.0, num_streams=NUM_STREAMS, num_pages=512, has_model=True)
QUICK = Extent(num_rounds=1, share=0.05, window_s=0.3, num_streams=8, num_pages=32, has_model=False)


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = command_line("tls_cost", this.__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, to see that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    extent = QUICK if args.quick else FULL
    about = machine()
    started_s, others = time.monotonic(), {}
    for part, measure in _parts(extent, figures, console).items():
        if part in args.parts:
            others[part] = _cores_used_by_others()
            console.print(f"{part}: {time.monotonic() - started_s:.0f} s, others use {others[part]:.2f} cores")
            measure()
    console.print(f"took {time.monotonic() - started_s:.0f} s")
    console.print(_table(figures))
    report = {
        "method": "benchmarks/tls_cost/__init__.py",
        "machine": {key: about[key] for key in ("processor", "cores", "kernel")}
        | {"load_average_at_the_end": os.getloadavg()},
        "cores_used_by_others_before": others,
        "num_rounds": extent.num_rounds,
        "figures": _rows(figures),
    }
    write_json(args.json, report)


def _parts(extent: Extent, figures: Figures, console: Console) -> Mapping[str, Callable[[], None]]:
    rounds = extent.num_rounds

    def latency() -> None:
        for case in (FAKE, SMOLLM2) if extent.has_model else (FAKE,):
            measure_latency(figures, case, num_rounds=rounds * LATENCY_TURNS, console=console)

    def tokens() -> None:
        watched = Watch(num_streams=extent.num_streams, window_s=extent.window_s)
        uvloop.run(measure_tokens(figures, watched, num_rounds=rounds))

    def requests() -> None:
        uvloop.run(measure_grpc_requests(figures, num_rounds=rounds, num_requests=extent.part(1500)))
        uvloop.run(measure_http_requests(figures, num_rounds=rounds, num_requests=extent.part(1500)))

    def kv() -> None:
        uvloop.run(measure_kv(figures, num_rounds=rounds, num_pages=extent.num_pages, window_s=extent.window_s))

    def parts() -> None:
        measure_signatures(figures, num_rounds=rounds, num_calls=extent.part(400))
        uvloop.run(measure_connections(figures, num_rounds=rounds, num_calls=extent.part(200)))

    return {
        "latency": latency,
        "tokens": tokens,
        "requests": requests,
        "kv": kv,
        "parts": parts,
    }


def _cores_used_by_others() -> float:
    """Return how busy the machine is before a part begins: this process sleeps, and has no children."""
    share: float = psutil.cpu_percent(interval=1.0)
    return share / 100 * (psutil.cpu_count() or 1)


def _rows(figures: Figures) -> list[dict[str, Any]]:
    """Return a row for each case and unit: the rounds of both arms, medians, and the paired ratios."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for figure in figures.all.values():
        key = (figure.part, figure.case, figure.unit)
        row = rows.setdefault(key, {"part": figure.part, "case": figure.case, "unit": figure.unit})
        row[figure.arm] = {"median": figure.median, "rounds": figure.rounds}
    for row in rows.values():
        if OFF in row and ON in row:
            # Where nothing was used that the kernel would have counted, there is no ratio.
            ratios = figures.ratios(figures.all[row["part"], row["case"], ON, row["unit"]], OFF)
            row["ratio"] = {"median": statistics.median(ratios), "rounds": ratios} if ratios else None
    return list(rows.values())


def _table(figures: Figures) -> Table:
    table = Table("part", "case", "unit", "off", "on", "on/off (quartiles)", title="medians of the rounds (range)")
    for row in _rows(figures):
        off, on, both = (_text(row.get(arm), 0, 100) for arm in (OFF, ON, "both"))
        table.add_row(row["part"], row["case"], row["unit"], off or both, on, _text(row.get("ratio"), 25, 75))
    return table


def _text(values: Mapping[str, Any] | None, low: float, high: float) -> str:
    return "" if values is None else spread(values["rounds"], percentiles=(low, high))


if __name__ == "__main__":
    main()
