"""Finds guards that the chaos walk would miss: each is taken out of a copy of the code, and the walks of the tests run.

    python -m benchmarks.prover [NAME ...] [--list] [--jobs N] [--json FILE] [--page FILE]

Method. A copy of the tree gets the edits of one guard (`benchmarks/guards.py`); then the walks of the test suite
(`tests/measure/simulate/test_chaos.py`) run in it up to the first failure. Noticed: some walk fails. Reported are that
test, what it says, and the CPU time until then. The whole copy must pass untouched, too. `--page`
writes the table into a page (`benchmarks/results/chaos.md`), between the two comments that name the prover.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

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
NOTHING = "nothing"
_BEGIN, _END = "<!-- prover -->", "<!-- end of prover -->"


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
    """Run the walks in a copy up to the first failure.

    Raises RuntimeError when they did not run to an end or a failure: that says nothing about the guard.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", WALKS]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["prlimit", f"--cpu={CPU_LIMIT_S}", *command], cwd=copy, env=environment, stdout=output, stderr=output
        )
        _pid, status, usage = os.wait4(process.pid, 0)
        process.returncode = exit_status = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    cpu_s = round(usage.ru_utime + usage.ru_stime, 1)
    if exit_status == 0:
        return Verdict(guard=name, noticed_by="", says="", cpu_s=cpu_s)
    if exit_status < 0:  # killed at the limit
        return Verdict(guard=name, noticed_by="(no end)", says=f"no end within {CPU_LIMIT_S} s of CPU", cpu_s=cpu_s)
    failed = re.search(r"^(?:FAILED|ERROR) tests/\S*?::(.*?)(?: - (.*))?$", printed, re.MULTILINE)
    if exit_status != pytest.ExitCode.TESTS_FAILED or failed is None:
        raise RuntimeError(f"cannot judge {name!r}: pytest ended with {exit_status}: {printed.strip()[-_MAX_CHARS:]}")
    return Verdict(guard=name, noticed_by=failed[1], says=(failed[2] or "")[:_MAX_CHARS], cpu_s=cpu_s)


def judge(guard: Guard | None) -> Verdict:
    """Run the walks in a copy of its own, without a guard or, for None, with all."""
    with copied() as copy:
        if guard is None:
            return run_walks(copy, NOTHING)
        with without(guard, copy):
            return run_walks(copy, guard.name)


def write_page(page: Path, verdicts: list[Verdict]) -> None:
    """Write the table of the verdicts into a page, between the two comments."""
    rows = [
        f"| {each.guard} | {each.noticed_by.removeprefix('test_').replace('_', ' ') or '**no**'} | {each.cpu_s} |"
        for each in verdicts
    ]
    table = "\n".join(["| taken out | noticed by | after s of CPU |", "|---|---|---|", *rows])
    noticed = f"{sum(bool(each.noticed_by) for each in verdicts)} of {len(verdicts)} guards noticed."
    head, tail = page.read_text(encoding="utf-8").split(_BEGIN)[0], page.read_text(encoding="utf-8").split(_END)[1]
    page.write_text(f"{head}{_BEGIN}\n{noticed}\n\n{table}\n{_END}{tail}", encoding="utf-8")


def main() -> None:
    """Run the benchmark."""
    parser = command_line("prover", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="guards to take out; all by default")
    parser.add_argument("--list", action="store_true", help="print the names of the guards")
    parser.add_argument("--jobs", type=int, default=1, help="guards that are taken out at a time")
    parser.add_argument("--page", type=Path, help="page whose table is written anew")
    args = parser.parse_args()
    console = terminal()
    if args.list:
        console.print("\n".join(guard.name for guard in GUARDS))
        return
    chosen = [guard for guard in GUARDS if not args.names or guard.name in args.names]
    found: dict[str, Verdict] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(judge, guard) for guard in (None, *chosen)]):
            verdict = done.result()
            found[verdict.guard] = verdict
            console.print(f"{verdict.guard}: {verdict.noticed_by or 'NOT NOTICED'}, {verdict.cpu_s} s; {verdict.says}")
    whole = found[NOTHING]
    if whole.noticed_by:
        raise SystemExit(f"cannot judge guards: the walks fail with all of them: {whole.says}")
    verdicts = [found[guard.name] for guard in chosen]
    noticed = sum(bool(each.noticed_by) for each in verdicts)
    document = {"machine": machine(), "noticed": noticed, "of": len(verdicts), "whole_cpu_s": whole.cpu_s}
    write_json(args.json, {**document, "guards": [asdict(each) for each in verdicts]})
    if args.page is not None:
        write_page(args.page, verdicts)
    console.print(f"{noticed} of {len(verdicts)} noticed")


if __name__ == "__main__":
    main()
