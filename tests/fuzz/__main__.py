"""`python -m tests.fuzz TARGET…|all --seconds N [--corpus DIR]`: fuzz targets, one after the other.

Prints what each did and found; the exit code is 1 when anything was found. `--replay FILE` tries one input instead.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.child import CORPUS, kept_file, load_atheris, read_inputs, read_kept
from tests.fuzz.runner import Finding, Runner
from tests.fuzz.targets.catalog import TARGETS

_MAX_KEPT = 60
"""Inputs of one target in the tree."""
_STATUS = re.compile(r"^#(\d+)\s.*?cov: (\d+) ft: (\d+) corp: (\d+)/(\S+).*?exec/s: (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Outcome of fuzzing one target."""

    target: str
    num_executions: int
    executions_per_s: int
    num_inputs: int
    num_edges: int
    findings: Sequence[Finding]
    death: str
    """Last words of a process that did not end well."""


def fuzz(name: str, *, seconds: int, seed: int, corpus: Path | None, keep: bool) -> Report:
    """Fuzz one target in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        grown = Path(scratch) / "corpus" if corpus is None else corpus / name
        grown.mkdir(parents=True, exist_ok=True)
        out = Path(scratch) / "findings"
        for number, data in enumerate(read_kept(name)):
            (grown / f"kept-{number}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.child", name, f"--seconds={seconds}", f"--seed={seed}"]
        done = subprocess.run(
            [*command, f"--out={out}", str(grown)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
        told = done.stderr.decode(errors="replace")
        findings = [Finding.of_json(line) for line in out.read_text().splitlines()] if out.exists() else []
        death = ""
        if done.returncode != 0:
            current = out.with_suffix(".current")
            tried = current.read_bytes().hex() if current.exists() else "nothing"
            death = f"exit status {done.returncode}, in {tried}\n{told[-3000:]}"
        if keep:
            keep_inputs(name, grown)
    last = (_STATUS.findall(told) or [("0", "0", "0", "0", "", "0")])[-1]
    return Report(
        target=name,
        num_executions=int(last[0]),
        executions_per_s=int(last[0]) // max(1, seconds),
        num_inputs=int(last[3]),
        num_edges=int(last[1]),
        findings=findings,
        death=death,
    )


def keep_inputs(name: str, grown: Path) -> None:
    """Put some of the inputs that have shown something new into the tree, small ones and large ones.

    Inputs with which something is wrong are left out: those are regressions, once they are mended.
    """
    inputs = sorted({*read_kept(name), *read_inputs([grown])}, key=lambda data: (len(data), data))
    with Runner(TARGETS[name]()).running() as runner:
        good = [data for data in inputs if not runner.try_input(data)]
    CORPUS.mkdir(exist_ok=True)
    kept = good[:: -(-len(good) // _MAX_KEPT)] if good else []
    kept_file(name).write_text("".join(data.hex() + "\n" for data in kept))


def replay(name: str, data: bytes) -> int:
    """Try one input; print what is wrong with it, a JSON object a line, and return the exit code."""
    with Runner(TARGETS[name]()).running() as runner:
        found = runner.try_again(data)
    for finding in found:
        print(finding.to_json())  # noqa: T201
    return 1 if found else 0


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="TARGET", choices=[*TARGETS, "all"], help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="folder with a folder for each target; what is new is added")
    parser.add_argument("--keep", action="store_true", help="add some of what is new to the tree")
    parser.add_argument("--replay", metavar="FILE", help="try this input of the one target; - reads it from stdin")
    args = parser.parse_args()
    if args.replay is not None:
        data = sys.stdin.buffer.read() if args.replay == "-" else Path(args.replay).read_bytes()
        return replay(args.targets[0], data)
    if load_atheris() is None:
        print("atheris is not installed: inputs are chosen by chance, not by what they reach")  # noqa: T201
    names = list(TARGETS) if "all" in args.targets else args.targets
    has_findings = False
    row = "{:<16} {:>11} {:>8} {:>8} {:>8} {:>9}"
    print(row.format("target", "executions", "exec/s", "corpus", "edges", "findings"))  # noqa: T201
    for name in names:
        report = fuzz(name, seconds=args.seconds, seed=args.seed, corpus=args.corpus, keep=args.keep)
        figures = (report.num_executions, report.executions_per_s, report.num_inputs, report.num_edges)
        print(row.format(name, *figures, len(report.findings)), flush=True)  # noqa: T201
        for finding in report.findings:
            print(f"\n{finding.kind}: {finding.text}\n  input: {finding.data.hex()}\n", flush=True)  # noqa: T201
        if report.death:
            print(f"\nthe process died: {report.death}\n", flush=True)  # noqa: T201
        has_findings |= bool(report.findings or report.death)
    return 1 if has_findings else 0


if __name__ == "__main__":
    sys.exit(main())
