"""Which guards the chaos walk would miss: each is taken out of a copy of the code, and the walks of the tests run.

    python -m benchmarks.prover [NAME ...] [--list] [--json FILE]

Method. A copy of the tree gets the edits of one guard (`benchmarks/guards.py`); then the walks of the test suite
(`tests/measure/simulate/test_chaos.py`) run in it up to the first failure. Noticed: some walk fails. Reported are that
test, what it says, and the CPU time until then. The whole copy must pass untouched, which is tried first.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.command import command_line, machine, terminal, write_json
from benchmarks.guards import GUARDS, Guard

REPO = Path(__file__).parents[1]
WALKS = "tests/measure/simulate/test_chaos.py"
_IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "results", "*.egg-info", ".mypy_cache", ".ruff_cache"
)
CPU_LIMIT_S = 90
"""Some guards are against what never ends; all walks together take a third of it."""
_MAX_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of the walks without one guard."""

    guard: str
    noticed_by: str
    """The first test that failed; empty if none did."""
    says: str
    cpu_s: float


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="prover-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(REPO, copy, ignore=_IGNORED)
        yield copy


@contextmanager
def without(guard: Guard, copy: Path) -> Iterator[None]:
    """Take a guard out of a copy while the block runs."""
    before = {edit.file: (copy / edit.file).read_text(encoding="utf-8") for edit in guard.edits}
    try:
        for edit in guard.edits:
            path = copy / edit.file
            path.write_text(edit.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        yield
    finally:
        for file, text in before.items():
            (copy / file).write_text(text, encoding="utf-8")


def run_walks(copy: Path, name: str) -> Verdict:
    """Run the walks in a copy up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", WALKS]
    before_s = _children_cpu_s()
    done = subprocess.run(
        ["prlimit", f"--cpu={CPU_LIMIT_S}", *command],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )
    cpu_s = round(_children_cpu_s() - before_s, 1)
    if done.returncode == 0:
        return Verdict(guard=name, noticed_by="", says="", cpu_s=cpu_s)
    if done.returncode < 0:  # killed at the limit
        return Verdict(guard=name, noticed_by="(no end)", says=f"no end within {CPU_LIMIT_S} s of CPU", cpu_s=cpu_s)
    failed = re.search(r"^(?:FAILED|ERROR) tests/\S*?::(.*?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    test, says = (failed[1], failed[2] or "") if failed else ("", done.stdout.strip()[-_MAX_CHARS:])
    return Verdict(guard=name, noticed_by=test or f"exit status {done.returncode}", says=says[:_MAX_CHARS], cpu_s=cpu_s)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the benchmark."""
    parser = command_line("prover", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="guards to take out; all by default")
    parser.add_argument("--list", action="store_true", help="print the names of the guards")
    args = parser.parse_args()
    console = terminal()
    if args.list:
        console.print("\n".join(guard.name for guard in GUARDS))
        return
    chosen = [guard for guard in GUARDS if not args.names or guard.name in args.names]
    verdicts: list[Verdict] = []
    with copied() as copy:
        whole = run_walks(copy, "nothing")
        console.print(f"nothing taken out: {whole.noticed_by or 'passes'}, {whole.cpu_s} s")
        if whole.noticed_by:
            raise SystemExit(f"cannot judge guards: the walks fail with all of them: {whole.says}")
        for guard in chosen:
            with without(guard, copy):
                verdict = run_walks(copy, guard.name)
            verdicts.append(verdict)
            console.print(f"{guard.name}: {verdict.noticed_by or 'NOT NOTICED'}, {verdict.cpu_s} s; {verdict.says}")
            noticed = sum(bool(each.noticed_by) for each in verdicts)
            document = {"machine": machine(), "noticed": noticed, "of": len(verdicts), "whole_cpu_s": whole.cpu_s}
            write_json(args.json, {**document, "guards": [asdict(each) for each in verdicts]})
    console.print(f"{noticed} of {len(verdicts)} noticed")


if __name__ == "__main__":
    main()
