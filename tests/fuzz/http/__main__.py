"""`python -m tests.fuzz.http --seconds N`: prints what was answered and what was found; 1 when something was."""

import argparse
import secrets
import sys
import time
from collections.abc import Callable

from tests.fuzz.http.door import running_door
from tests.fuzz.http.oracle import Log
from tests.fuzz.http.schema_cases import SchemaCases
from tests.fuzz.http.wire_cases import WireCases


def fuzz(seed: int, goes_on: Callable[[int], bool], *, num_examples: int) -> Log:
    """Run rounds while `goes_on` says so of the number of those that are over; returns what happened."""
    log = Log()
    num_rounds = 0
    with running_door() as door:
        requests, connections = SchemaCases(door, log), WireCases(door, log)
        try:
            while num_rounds == 0 or goes_on(num_rounds):
                number = seed * 1_000_003 + num_rounds
                connections.run(number, num_examples=num_examples)
                requests.run(number, num_examples=num_examples)
                try:
                    door.until_idle()
                except TimeoutError:
                    log.find("round", "something is still held", number)
                    break
                num_rounds += 1
        finally:
            requests.close()
    return log


def fuzz_for(seconds: float, *, seed: int) -> Log:
    """Run rounds for that many seconds."""
    end_s = time.monotonic() + seconds
    return fuzz(seed, lambda _num_rounds: time.monotonic() < end_s, num_examples=15)


def main() -> int:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http", description="Fuzz the HTTP door.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 20), help="what is sent follows from it")
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    log = fuzz_for(args.seconds, seed=args.seed)
    for (where, status), count in sorted(log.statuses.items()):
        sys.stdout.write(f"{count:8} {status} {where}\n")
    sys.stdout.write(f"{sum(log.statuses.values())} answers, {len(log.findings)} findings\n")
    for finding in log.findings.values():
        sys.stdout.write(f"FOUND {finding}\n")
    return 1 if log.findings else 0


if __name__ == "__main__":
    sys.exit(main())
