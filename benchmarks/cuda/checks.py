"""Is what will be measured right? The oracle on small models, then the kernels' and the executor's own tests.

    python -m benchmarks.cuda.checks --only oracle|tests [--device cuda] [--out DIR] [--smoke]

Oracle: small random models in float32 on the device, eight requests that arrive in the middle of each other's work,
prompts cut into chunks, prefixes found in the cache; every greedy token must be the one that plain transformers
generates on the CPU from the same weights. Tests: the folders below tests/engine that run on a GPU where there is one,
in parallel, without those that only compile.
"""

import importlib.util
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda.arms import Arm, EngineArm, Format, transformers_model
from benchmarks.cuda.part import Part, part_parser, run_part
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
_TEST_PROCESSES = 12


def run_oracle(part: Part) -> None:
    """Compare answers with transformers'."""
    for model in _ORACLE_MODELS:
        with part.case(f"oracle, {model}"):
            _check_oracle(part, model)


def run_tests(part: Part) -> None:
    """Run the tests that want a GPU."""
    folders = [str(folder) for folder in _TEST_FOLDERS if folder.is_dir()]
    case = f"tests, {' '.join(folders)}"
    if part.has_time(case):
        with part.case(case):
            _run_tests(part, case, folders)


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
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed: make the folder of packages with deploy/bundle --dev")
    parallel = ["-n", str(min(_TEST_PROCESSES, usable_cores())), "--deselect", _COMPILE_TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, *folders]
    left_s = max(1.0, part.deadline_s - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not done after {left_s:.0f} s") from error
    print(done.stdout[-6000:], flush=True)
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    part.add(
        Reading(
            case=case,
            value=counts.get("passed", 0),
            unit="tests passed",
            note=", ".join(f"{number} {name}" for name, number in counts.items() if name != "passed"),
        )
    )
    if done.returncode != 0:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
        raise AssertionError(", ".join(failed[:5]) or f"pytest ended with {done.returncode}: {done.stderr[-300:]}")


def main(argv: list[str] | None = None) -> int:
    """Check; returns the exit status."""
    parser = part_parser("checks", __doc__)
    parser.add_argument("--only", choices=["oracle", "tests"], required=True, help="which of the two")
    args = parser.parse_args(argv)
    if args.only == "oracle":
        return run_part("checks-oracle", "Oracle: the same answers as transformers", args, run_oracle)
    return run_part("checks-tests", "Tests on the GPU", args, run_tests)


if __name__ == "__main__":
    sys.exit(main())
