"""Is what will be measured right? The oracle on small models, then the kernels' and the executor's own tests.

    python -m benchmarks.cuda.checks --only oracle|tests [--device cuda] [--out DIR] [--smoke]

Oracle: small random models in float32 on the device, eight requests that arrive in the middle of each other's work,
prompts cut into chunks, prefixes found in the cache; every greedy token must be the one that plain transformers
generates on the CPU from the same weights. Tests: the folders below tests/engine that run on a GPU where there is one,
in parallel and each by itself (`by_test`), without those that only compile. Their output is shown as it comes. When the
time is up, their processes are killed, and what has passed and failed until then is reported.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda.arms import Arm, EngineArm, Format, transformers_model
from benchmarks.cuda.part import Part, exit_when_terminated, part_parser, run_part
from benchmarks.cuda.report import Reading
from common.cgroups import usable_cores
from common.random_models import CONFIGS

_ORACLE_MODELS = ("tiny", "tiny-llama")
_PROMPT_TOKENS = (1, 15, 16, 17, 33, 64, 100, 257)
_NUM_OUTPUT_TOKENS = 32
_SMOKE_PROMPT_TOKENS, _NUM_SMOKE_OUTPUT_TOKENS = (1, 16, 17, 100), 8
_STEP_TOKENS = 48
_TEST_FOLDERS = tuple(Path("tests/engine") / name for name in ("triton_kernels", "cuda", "cuda_kv"))
_COMPILE_TESTS = "tests/engine/triton_kernels/test_compile.py"
_SMOKE_TESTS = Path("tests/engine/cuda/test_buffers.py")
_TEST_PROCESSES = 12
PLUGINS = (
    "xdist.plugin",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "_hypothesis_pytestplugin",
    "benchmarks.cuda.by_test",
)
"""The only plugins: others of the machine may not go together with the pytest that was carried there."""
_RESULT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED) (\S+\.py\b.*?)(?: - .*)?$")


def run_oracle(part: Part) -> None:
    """Compare answers with transformers'."""
    for model in _ORACLE_MODELS:
        with part.case(f"oracle, {model}"):
            _check_oracle(part, model)


def run_tests(part: Part) -> None:
    """Run the tests that want a GPU."""
    folders = [_SMOKE_TESTS] if part.is_smoke else [folder for folder in _TEST_FOLDERS if folder.is_dir()]
    case = f"tests, {' '.join(map(str, folders))}"
    if part.has_time(case):
        with part.case(case):
            _run_tests(part, case, list(map(str, folders)))


def _check_oracle(part: Part, model: str) -> None:
    engine = EngineArm(
        Arm(model=model, format=Format.FP32).serving_config(
            part.device, num_blocks=256, max_running=8, max_step_tokens=_STEP_TOKENS
        )
    )
    lengths, num_tokens = (
        (_SMOKE_PROMPT_TOKENS, _NUM_SMOKE_OUTPUT_TOKENS) if part.is_smoke else (_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS)
    )
    prompts = _prompts(lengths, CONFIGS[model]["vocab_size"])
    groups = []
    for prompt in prompts:
        groups.append(engine.add(prompt, max_tokens=num_tokens))
        engine.step()
        engine.step()
    engine.drain()
    # The same prompts again: now their prefixes are in the cache.
    groups += [engine.add(prompt, max_tokens=num_tokens) for prompt in prompts]
    engine.drain()
    reference = transformers_model(model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    expected = [_generate(reference, prompt, num_tokens) for prompt in prompts]
    found = [list(group.leader.output_token_ids) for group in groups]
    num_right = sum(answer == right for answer, right in zip(found, expected * 2, strict=True))
    part.add(Reading(case=f"oracle, {model}", value=num_right, unit=f"of {len(found)} answers"))
    if num_right != len(found):
        wrong = next(i for i, (answer, right) in enumerate(zip(found, expected * 2, strict=True)) if answer != right)
        raise AssertionError(f"answer {wrong} is {found[wrong]}, transformers says {(expected * 2)[wrong]}")


def _prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(vocab_size) for _ in range(max(lengths))]
    return [
        shared[: length // 2] + [rng.randrange(vocab_size) for _ in range(length - length // 2)] for length in lengths
    ]


@torch.inference_mode()
def _generate(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def _run_tests(part: Part, case: str, folders: list[str]) -> None:
    plugins = [each for plugin in PLUGINS for each in ("-p", plugin)]
    parallel = ["-n", str(min(_TEST_PROCESSES, usable_cores())), "--deselect", _COMPILE_TESTS]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *plugins, *parallel, *folders]
    lines, status = stream(command, max(1.0, part.deadline_s - time.monotonic()))
    found = {test: result for result, test in (match.groups() for match in map(_RESULT.search, lines) if match)}
    counts = Counter(found.values())
    note = ", ".join(f"{number} {result.lower()}" for result, number in counts.items() if result != "PASSED")
    part.add(Reading(case=case, value=counts["PASSED"], unit="tests passed", note=note))
    bad = [test for test, result in found.items() if result in ("FAILED", "ERROR")]
    if bad:
        raise AssertionError(f"{len(bad)} failed: {', '.join(bad[:5])}")
    if status is None:
        raise AssertionError("not all were done in time")
    if status:
        raise AssertionError(f"pytest ended with {status}: {' '.join(lines[-5:])}")


def stream(command: Sequence[str], limit_s: float) -> tuple[list[str], int | None]:
    """Run a command and show its output. Returns its lines, and its exit status: None if it was killed at the limit.

    Whatever it has started and left behind is killed.
    """
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0
    )
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill_group(process)

    timer = threading.Timer(limit_s, end)
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            print(f"  {lines[-1]}", flush=True)
        status = process.wait()
    finally:
        timer.cancel()
        _kill_group(process)
    return lines, None if is_late.is_set() else status


def _kill_group(process: "subprocess.Popen[str]") -> None:
    """End a process and all that it has started, which may still run when it does not."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    """Check; returns the exit status."""
    parser = part_parser("checks", __doc__)
    parser.add_argument("--only", choices=["oracle", "tests"], required=True, help="which of the two")
    args = parser.parse_args(argv)
    if args.only == "oracle":
        return run_part("checks-oracle", "Oracle: the same answers as transformers", args, run_oracle)
    return run_part("checks-tests", "Tests on the GPU", args, run_tests)


if __name__ == "__main__":
    exit_when_terminated()
    sys.exit(main())
