"""`python -m tests.fuzz TARGET…|all --seconds N`: fuzz targets, each in a process of its own, to its first finding.

Returns 1 when anything was found. `--replay FILE` tries one input of one target instead.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.inputs import keep, read_inputs, read_kept
from tests.fuzz.runner import Runner
from tests.fuzz.targets.catalog import TARGETS


def fuzz(name: str, *, seconds: int, seed: int, keeps: bool) -> bool:
    """Fuzz one target; return whether anything was found."""
    with tempfile.TemporaryDirectory() as folder:
        grown = Path(folder)
        for number, data in enumerate(read_kept(name)):
            (grown / f"kept-{number}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.child", name, str(seconds), str(seed), folder]
        has_found = subprocess.run(command, check=False).returncode != 0
        if keeps:
            with Runner(TARGETS[name]()).running() as runner:
                keep(name, [data for data in read_inputs(grown) if not runner.try_input(data)])
    return has_found


def replay(name: str, data: bytes) -> bool:
    """Try one input; print what is wrong with it, and return whether anything is."""
    with Runner(TARGETS[name]()).running() as runner:
        found = runner.try_again(data)
    sys.stdout.writelines(f"{each}\n" for each in found)
    return bool(found)


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="TARGET", choices=[*TARGETS, "all"], help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="add some of what is new to the tree")
    parser.add_argument("--replay", metavar="FILE", help="try this input of the one target; - reads it from stdin")
    args = parser.parse_args()
    if args.replay is not None:
        data = sys.stdin.buffer.read() if args.replay == "-" else Path(args.replay).read_bytes()
        return replay(args.targets[0], data)
    names = list(TARGETS) if "all" in args.targets else args.targets
    found = [name for name in names if fuzz(name, seconds=args.seconds, seed=args.seed, keeps=args.keep)]
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
