"""`python -m tests.fuzz.http --seconds N`: prints what was answered and what was found; 1 when something was."""

import argparse
import secrets
import sys

from tests.fuzz.http.runner import fuzz_for


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
