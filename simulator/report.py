"""One page about a comparison: a table and plots in a file of its own."""

import html
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from string import Template

from rich.console import Console

from simulator.comparison import Comparison
from simulator.replay import CellResult, read_requests
from simulator.tables import comparison_table

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222 }
pre { font-size: 12px; overflow-x: auto } h2 { margin-top: 1.6em } svg { max-width: 100%; height: auto }
</style></head><body><h1>$title</h1>
$body
</body></html>
""")
_TABLE_WIDTH = 200


def write_report(comparison: Comparison, results: Sequence[CellResult]) -> Path:
    """Write `table.txt` and `report.html` to the comparison's folder and return the page. Raises OSError.

    Without matplotlib the page says how to get plots.
    """
    table = _table_text(results)
    (comparison.out / "table.txt").write_text(table, encoding="utf-8")
    parts = [f"<pre>{html.escape(_settings_text(comparison))}</pre>", f"<pre>{html.escape(table)}</pre>"]
    if importlib.util.find_spec("matplotlib") is None:
        parts.append("<p>Plots need matplotlib: <code>pip install 'kvrelay[report]'</code></p>")
    else:
        parts += _plots(comparison, results)
    page = comparison.out / "report.html"
    title = html.escape(f"Placement policies on {comparison.settings.trace.stem}")
    page.write_text(_PAGE.substitute(title=title, body="\n".join(parts)), encoding="utf-8")
    return page


def _plots(comparison: Comparison, results: Sequence[CellResult]) -> Iterator[str]:
    from simulator import plots

    outcomes = [plots.outcome(result, read_requests(comparison.folder(result.cell))) for result in results]
    slo = comparison.settings.slo
    yield "<h2>Goodput and load</h2>" + plots.goodput_by_speed(outcomes)
    yield "<h2>Hits and balance</h2>" + plots.hits_and_balance(outcomes)
    for speed, group in groupby(outcomes, key=lambda outcome: outcome.speed):
        cells = list(group)
        yield f"<h2>Latency at speed {speed:g}</h2>" + plots.latency_curves(
            cells, slo_ttft_s=slo.ttft_s, slo_itl_s=slo.itl_s
        )
        yield f"<h2>Load of each worker at speed {speed:g}</h2>" + plots.load_over_time(cells)


def _settings_text(comparison: Comparison) -> str:
    settings = comparison.settings
    hardware, slo = settings.hardware, settings.slo
    workers = f"{settings.num_prefill}P{settings.num_decode}D" if settings.num_prefill else f"{settings.num_decode}"
    on = hardware.timing_file.name if hardware.timing_file else f"{hardware.model} on {hardware.device}"
    return "\n".join(
        [
            f"trace      {settings.trace.name}, lengths / {settings.shrink}, first {settings.num_requests or 'all'}",
            f"workers    {workers}, {on}, {settings.num_blocks} pages of {settings.block_size} tokens each,"
            f" steps of at most {settings.max_step_tokens} tokens",
            f"routers    {settings.num_routers}; load and KV events every {settings.report_interval_s:g} s,"
            f" {settings.event_lag_s:g} s late; refused at once: {settings.shed}",
            f"SLO        TTFT {slo.ttft_s:g} s per {slo.ttft_tokens} prompt tokens, at least one of these;"
            f" mean gap {slo.itl_s * 1000:g} ms; refusals and misses are not good",
            f"seed       {settings.seed}",
        ]
    )


def _table_text(results: Sequence[CellResult]) -> str:
    console = Console(width=_TABLE_WIDTH, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(comparison_table(results))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
