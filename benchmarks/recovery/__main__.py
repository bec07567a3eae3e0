"""The command: measures the rows that are missing, and writes the table."""

import asyncio
import json
import re
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import benchmarks.recovery as this
from benchmarks.command import command_line, machine, terminal, write_json
from benchmarks.faults import CannotInflict, Fault, PrivateNetwork
from benchmarks.figures import Figures
from benchmarks.recovery.rounds import measure
from benchmarks.recovery.targets import PLANS, Plan, target_of

_BEGIN, _END = "<!-- recovery -->", "<!-- end of recovery -->"
_HEADER = (
    "| fault | rounds | largest gap in a stream | TTFT | undisturbed gap, TTFT | replaced after | |",
    "|---|---|---|---|---|---|---|",
)


def row_of(case: str, figures: Sequence[dict[str, Any]]) -> str:
    """Return the row of a case, whose figures are those of the JSON document."""
    found = {(each["arm"], each["unit"]): each["rounds"] for each in figures if each["case"] == case}
    gap, hurt = "largest gap s", "clients of router-0"
    times = [_both(found[hurt, unit]) for unit in (gap, "largest TTFT s")]
    times.append(", ".join(_both(found["undisturbed", unit]) for unit in (gap, "largest TTFT s")))
    after = {unit.removesuffix(" s"): _both(rounds) for (_, unit), rounds in found.items() if unit.endswith("after s")}
    times.append(after.pop("back after", "–"))
    notes = [f"{name} {both}" for name, both in after.items()]
    if (others := found.get(("clients of router-1", gap))) is not None:
        notes.append(f"clients of the other router: gap {_both(others)}")
    wrong = sum(sum(rounds) for (_, unit), rounds in found.items() if unit in ("failed", "differ"))
    notes += [f"**{wrong:g} failed or different**"] if wrong else []
    return f"| {case} | {len(found[hurt, gap])} | {' | '.join(times)} | {'; '.join(notes)} |"


def _both(rounds: Sequence[float]) -> str:
    """Return median and largest, in seconds."""
    middle = statistics.median(rounds)
    digits = 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} s, {max(rounds):.{digits}f} s"


def table(document: dict[str, Any]) -> str:
    """Return the table of a document, as Markdown."""
    done = _done(document)
    rows = [row_of(plan.case, document["figures"]) for plan in PLANS if plan.case in done]
    left_out = [f"\nNot measured: {case}: {why}" for case, why in document["missing"].items()]
    return "\n".join([*_HEADER, *rows, *left_out])


def _done(document: dict[str, Any]) -> set[str]:
    return {figure["case"] for figure in document["figures"]}


def write_page(page: Path, document: dict[str, Any]) -> None:
    """Write the table into a page, between the two comments. Raises ValueError without them."""
    text = page.read_text(encoding="utf-8")
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"cannot write the table: {page} has no {_BEGIN} … {_END}; add both comments")
    between = re.compile(f"{_BEGIN}.*{_END}", re.DOTALL)
    page.write_text(between.sub(lambda _: f"{_BEGIN}\n{table(document)}\n{_END}", text), encoding="utf-8")


def run(plan: Plan, args: Namespace, document: dict[str, Any], console: Console) -> bool:
    """Measure one plan into the document; returns whether nothing failed and no text differs."""
    figures = Figures()
    try:
        network = PrivateNetwork() if plan.fault is Fault.CUT else None
    except CannotInflict as error:
        document["missing"][plan.case] = str(error)
        return True
    started_s = time.monotonic()
    with target_of(plan, args.engine, console, network=network) as target:
        is_clean = asyncio.run(measure(target, figures, num_rounds=args.rounds, console=console))
    document["figures"] += figures.rows()
    document["seconds"][plan.case] = round(time.monotonic() - started_s, 1)
    return is_clean


def main() -> None:
    """Run the benchmark."""
    parser = command_line("recovery", this.__doc__, rounds=10)
    cases = [plan.case for plan in PLANS]
    parser.add_argument("--only", action="append", choices=cases, metavar="ROW", help="a row, as `decode stopped`")
    parser.add_argument("--engine", choices=["fake", "torch"], default="fake", help="none, or the default model")
    parser.add_argument("--page", type=Path, help="page whose table is written anew")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the JSON file has")
    args = parser.parse_args()
    console, is_clean = terminal(), True
    document: dict[str, Any] = {"method": "benchmarks/recovery/__init__.py", "machine": machine(), "missing": {}}
    document |= {"seconds": {}, "figures": []}
    if args.resume and args.json is not None and args.json.exists():
        document = json.loads(args.json.read_text(encoding="utf-8"))
    for plan in PLANS:
        if plan.case in _done(document) or plan.case not in (args.only or cases):
            continue
        if plan.fault is Fault.HANG and args.engine != "fake":
            document["missing"][plan.case] = "only a fake engine hangs on demand"
            continue
        is_clean = run(plan, args, document, console) and is_clean
        write_json(args.json, document)
        if args.page is not None:
            write_page(args.page, document)
    console.print(table(document), markup=False)
    console.print(f"{sum(document['seconds'].values()):.0f} s")
    if not is_clean:
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
