"""Shell of all parts: arguments, a time budget, and isolation of a case that fails."""

import argparse
import logging
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.cuda.report import DEFAULT_OUT, Failure, Reading, Report

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 400


@dataclass(slots=True, kw_only=True)
class Part:
    """One running part."""

    device: torch.device
    is_smoke: bool
    """Tiny shapes: shows that the scripts work; what they measure then means nothing."""
    out: Path
    deadline_s: float
    """End of the time for cases, on the monotonic clock; later ones are left out and named."""
    report: Report
    left_out: list[str] = field(default_factory=list)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run one case: whatever it raises is reported as its failure, and the next one goes on."""
        try:
            yield
        except Exception as error:  # the top of a case
            logger.exception("%s failed", name)
            self.fail(name, f"{type(error).__name__}: {error}")

    def fail(self, name: str, reason: str) -> None:
        """Report a case as failed."""
        self.report.failures.append(Failure(case=name, reason=" ".join(reason.split())[:_MAX_REASON_CHARS]))
        self.report.save(self.out)

    def has_time(self, name: str) -> bool:
        """Whether a case may start; if not, the report will name it."""
        if time.monotonic() < self.deadline_s:
            return True
        self.left_out.append(name)
        return False

    def add(self, reading: Reading) -> None:
        """Report a value: show and save it at once. The goals of a smoke run mean nothing and are left out."""
        if self.is_smoke:
            reading = Reading(
                case=reading.case, value=reading.value, unit=reading.unit, bound=reading.bound, ratio=reading.ratio
            )
        self.report.readings.append(reading)
        ratio = "" if reading.ratio is None else f", ratio {reading.ratio:.2f}"
        self.report.save(self.out)
        print(f"  {reading.case}: {reading.value:.4g} {reading.unit}{ratio} {reading.note}".rstrip(), flush=True)

    def add_time(
        self, case: str, time_s: float, bound_s: float, *, unit: str = "ms", goal: float | None = None, note: str = ""
    ) -> None:
        """Report a time beside its bound; the ratio is the share of the bound that was reached."""
        scale = {"ms": 1e3, "us": 1e6}[unit]
        value, bound = time_s * scale, bound_s * scale
        self.add(Reading(case=case, value=value, unit=unit, bound=bound, ratio=bound_s / time_s, goal=goal, note=note))


def part_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every part has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.cuda.{name}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a smoke run (default cuda)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder for the JSON (default {DEFAULT_OUT})")
    parser.add_argument("--budget-s", type=float, default=120.0, help="no case starts after so long (default 120)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: does the script work?")
    return parser


def run_part(name: str, title: str, args: argparse.Namespace, measure: Callable[[Part], None]) -> int:
    """Run `measure`, print its table, save `<name>.json`; returns the exit status: 1 when a case failed."""
    started_s = time.monotonic()
    device = torch.device(args.device)
    report = Report(part=name, title=title, machine=describe_machine(device))
    part = Part(device=device, is_smoke=args.smoke, out=args.out, deadline_s=started_s + args.budget_s, report=report)
    with part.case(name):
        measure(part)
    for left_out in part.left_out:
        part.fail(left_out, "no time left for it")
    report.seconds = time.monotonic() - started_s
    report.save(part.out)
    print(report.table(), flush=True)
    return 1 if report.failures else 0


def exit_when_terminated() -> None:
    """Let SIGTERM end this process by SystemExit: processes that it has started would outlive it."""
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))


def describe_machine(device: torch.device) -> str:
    """Return what the numbers are of: device and the versions that matter."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"
