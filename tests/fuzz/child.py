"""One process that fuzzes one target: with atheris, by coverage, else by chance. Findings go to a file, a line each.

With atheris the process ends inside it, as libFuzzer does.
"""

import argparse
import importlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.runner import Finding, Runner

CORPUS = Path(__file__).parent / "corpus"
REGRESSIONS = Path(__file__).parent / "regressions"
_INSTRUMENTED = ("common", "router", "worker", "decode_worker", "prefill_worker", "kv_transfer", "engine")
_MAX_INPUT_BYTES = 2_048
_SLOWNESS = 4.0
"""Instrumented code takes about so many times as long."""


def kept_file(name: str) -> Path:
    """Return the file of a target's corpus, which may not exist."""
    return CORPUS / f"{name}.txt"


def read_kept(name: str) -> list[bytes]:
    """Return a target's corpus."""
    path = kept_file(name)
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


def read_inputs(folders: Sequence[Path]) -> list[bytes]:
    """Return the inputs in some folders, one a file, in order."""
    return [path.read_bytes() for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def load_atheris() -> Any:
    """Return the module, or None where it is not installed."""
    try:
        return importlib.import_module("atheris")
    except ImportError:
        return None


class Fuzzing:
    """Tries inputs, confirms what is found, and writes down what is new."""

    def __init__(self, runner: "Runner", out: Path) -> None:
        self._runner = runner
        self._out = out
        self._known: set[str] = set()
        self._current = out.with_suffix(".current")

    def try_one(self, data: bytes) -> None:
        """Try one input. Never raises."""
        self._current.write_bytes(data)
        found = [finding for finding in self._runner.try_input(data) if finding.signature not in self._known]
        if found and (confirmed := self._confirm(found, data)):
            with self._out.open("a", encoding="utf-8") as lines:
                for finding in confirmed:
                    self._known.add(finding.signature)
                    lines.write(finding.to_json() + "\n")

    def _confirm(self, found: Sequence["Finding"], data: bytes) -> list["Finding"]:
        again = [each for each in self._runner.try_again(data) if each.signature not in self._known]
        if all(each.kind == "slow" for each in again) and again:
            again = replay(self._runner.target.name, data)
            if not again:  # it was instrumentation that took the time
                self._runner.max_loop_s *= 2
        return again


def replay(name: str, data: bytes) -> list["Finding"]:
    """Return what is wrong with an input in a process of its own, where nothing is instrumented."""
    from tests.fuzz.runner import Finding

    command = [sys.executable, "-m", "tests.fuzz", name, "--replay", "-"]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    lines = done.stdout.decode().splitlines()
    return [Finding.of_json(line) for line in lines if line.startswith("{")]


def _fuzz_by_chance(try_one: Callable[[bytes], None], inputs: Sequence[bytes], *, seconds: float, seed: int) -> None:
    """Try inputs, and then changed ones, until the time is up. Prints what libFuzzer would."""
    draw = random.Random(seed)
    ends_s = time.monotonic() + seconds
    started_s, num_tried = time.monotonic(), 0
    for data in inputs:
        try_one(data)
        num_tried += 1
    while time.monotonic() < ends_s:
        try_one(mutate(draw, inputs))
        num_tried += 1
    per_s = num_tried / max(time.monotonic() - started_s, 1e-9)
    print(f"#{num_tried} DONE cov: 0 ft: 0 corp: {len(inputs)}/0b exec/s: {per_s:.0f}", file=sys.stderr)  # noqa: T201


def mutate(draw: random.Random, inputs: Sequence[bytes]) -> bytes:
    """Return an input that is like one of those given, or like none."""
    if not inputs or draw.random() < 0.3:
        return draw.randbytes(draw.choice((2, 8, 30, 100, 300)))
    data = bytearray(draw.choice(inputs))
    for _ in range(draw.randrange(1, 5)):
        place = draw.randrange(len(data) + 1)
        data[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
    return bytes(data)


def main() -> None:
    """Fuzz."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("corpus", type=Path)
    args = parser.parse_args()
    atheris = load_atheris()
    if atheris is None:
        _run(args, None)
    else:
        with atheris.instrument_imports(include=list(_INSTRUMENTED)):
            importlib.import_module("tests.fuzz.targets.catalog")
        _run(args, atheris)


def _run(args: argparse.Namespace, atheris: Any) -> None:
    from tests.fuzz.runner import MAX_LOOP_S, Runner
    from tests.fuzz.targets.catalog import TARGETS

    target = TARGETS[args.target]()
    max_loop_s = MAX_LOOP_S if atheris is None else MAX_LOOP_S * _SLOWNESS
    with Runner(target, max_loop_s=max_loop_s).running() as runner, suppress(KeyboardInterrupt):
        fuzzing = Fuzzing(runner, args.out)
        for data in target.seeds():
            fuzzing.try_one(data)
        if atheris is None:
            inputs = [*target.seeds(), *read_inputs([args.corpus])]
            _fuzz_by_chance(fuzzing.try_one, inputs, seconds=args.seconds, seed=args.seed)
            return
        options = [f"-max_total_time={args.seconds}", f"-max_len={_MAX_INPUT_BYTES}", f"-seed={args.seed}"]
        options += ["-timeout=600", "-rss_limit_mb=8192", "-report_slow_units=600", f"-artifact_prefix={args.out}-"]
        atheris.Setup([sys.argv[0], *options, str(args.corpus)], fuzzing.try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
