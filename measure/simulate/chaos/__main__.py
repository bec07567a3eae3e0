"""Walks one seed after the other, with progress; see the package."""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from measure.simulate.chaos.many import walk_all
from measure.simulate.chaos.settings import ChaosReport, ChaosSettings, FaultKind, draw_settings

_SAVED_EVERY = 20
"""Walks after which the figures are written."""


@dataclass(slots=True)
class Swarm:
    """Sums over walks."""

    num_walks: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    num_replans: int = 0
    num_flooding: int = 0
    num_direct: int = 0
    num_lost_routers: int = 0
    drain_s: float = 0.0
    """Longest of any walk."""
    whole_s: float = 0.0
    """Likewise."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)
    """By seed."""

    def add(self, settings: ChaosSettings, report: ChaosReport, cpu_s: float) -> None:
        """Add a walk."""
        self.num_walks += 1
        self.cpu_s += cpu_s
        self.virtual_s += report.virtual_s
        self.num_replans += report.num_replans
        self.num_flooding += report.num_flooding
        self.num_direct += report.num_direct
        self.num_lost_routers += report.num_lost_routers
        self.drain_s = max(self.drain_s, report.drain_s)
        self.whole_s = max(self.whole_s, report.whole_s)
        self.outcomes += report.outcomes
        self.faults += {str(fault): count for fault, count in report.faults.items()}
        if report.violations:
            self.violations[settings.seed] = report.violations

    def figures(self) -> dict[str, object]:
        """Return everything as JSON."""
        num_requests = self.outcomes.total() + self.num_flooding
        return {
            "walks": self.num_walks,
            "requests": num_requests,
            "of_floods": self.num_flooding,
            "direct": self.num_direct,
            "lost_routers": self.num_lost_routers,
            "virtual_hours": round(self.virtual_s / 3600, 3),
            "cpu_s": round(self.cpu_s, 1),
            "requests_per_cpu_s": round(num_requests / max(self.cpu_s, 1e-9), 1),
            "replans": self.num_replans,
            "longest_drain_s": round(self.drain_s, 3),
            "longest_until_whole_s": round(self.whole_s, 3),
            "outcomes": dict(self.outcomes.most_common()),
            "faults": dict(self.faults.most_common()),
            "violations": self.violations,
        }


def main() -> int:
    """Run the walks of the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m measure.simulate.chaos", description="Random faults in a simulated cluster, seed by seed."
    )
    parser.add_argument("--seeds", default="1-50", help="one, or FIRST-LAST")
    parser.add_argument("--requests", type=int, default=250, help="of each walk")
    parser.add_argument("--jobs", type=int, default=1, help="walks at a time, each on a core")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no walk begins after this time")
    parser.add_argument("--out", type=Path, help="file of the figures, JSON")
    parser.add_argument("--verbose", action="store_true", help="with the log of routers and workers")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    seeds, swarm, ends_s = range(int(first), int(last or first) + 1), Swarm(), time.monotonic() + 60 * args.minutes
    walks = (draw_settings(seed, num_requests=args.requests) for seed in seeds)
    level = logging.WARNING if args.verbose else logging.CRITICAL
    for walked in walk_all(takewhile(lambda _: time.monotonic() < ends_s, walks), jobs=args.jobs, log_level=level):
        swarm.add(walked.settings, walked.report, walked.cpu_s)
        say(f"seed {walked.settings.seed}: {_sketch(walked.settings, walked.report)}")
        for violation in walked.report.violations:
            say(f"  VIOLATION {violation}")
        if args.out is not None and swarm.num_walks % _SAVED_EVERY == 0:
            save(args.out, swarm)
    text = json.dumps(swarm.figures(), indent=2)
    print(text)  # noqa: T201
    if args.out is not None:
        save(args.out, swarm)
    return 1 if swarm.violations else 0


def save(path: Path, swarm: Swarm) -> None:
    """Write the figures so far: a long run that is cut off keeps them."""
    path.write_text(json.dumps(swarm.figures(), indent=2) + "\n", encoding="utf-8")


def _sketch(settings: ChaosSettings, report: ChaosReport) -> str:
    shape = f"{settings.num_prefill}P{settings.num_decode}D, {settings.num_routers} routers"
    faults = ", ".join(f"{report.faults[fault]} x {fault}" for fault in FaultKind if fault in settings.faults)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.most_common())
    return f"{shape}; {faults}; {outcomes}; drained in {report.drain_s:.1f} s, whole in {report.whole_s:.1f} s"


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
