"""Tests of `model.engine: vllm` need vLLM beside kvrelay: `make test-vllm` runs them in a venv of its own.

Importing vLLM takes a process eight seconds of CPU. So the engines of all tests live in pytest's process, and one other
process asks vLLM's own `LLM.generate` for everything that they are compared with.
"""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.clock import SystemClock
from common.engines import VLLM_VERSION, installed_package, vllm_version
from engine.core import EngineCore
from engine.executor import Executor
from engine.options import EngineOptions
from engine.scheduler import SchedulerLimits
from tests.builders import make_request, run_until_idle, served, submit
from tests.short_model import write_short_model

BLOCK_SIZE = 32
MAX_TOKENS = 24
NEAR_TIE = 0.25
"""Largest difference of two logits that counts as none in bfloat16."""
_LENGTHS = (1, 31, 32, 33, 63, 64, 65, 150)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if vllm_version(installed_package) != VLLM_VERSION:
        skip = pytest.mark.skip(reason=f"vLLM {VLLM_VERSION} is not installed here: run `make test-vllm`")
        for item in items:
            if "tests/vllm/" in item.nodeid:
                item.add_marker(skip)


def options(model_dir: Path, **changes: Any) -> EngineOptions:
    return EngineOptions(
        model_dir=model_dir,
        model_name="short",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=64,
        max_model_len=512,
        max_step_tokens=256,
        max_running=8,
        runner="vllm",
        **changes,
    )


def core_of(executor: Executor, *, max_step_tokens: int = 256) -> EngineCore:
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=max_step_tokens, max_running=8, max_waiting=64)
    return EngineCore(executor, limits, SystemClock())


def request_of(prompt: Sequence[int], **sampling: Any) -> Any:
    return make_request(prompt, block_size=BLOCK_SIZE, **{"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling)


def answers_of(core: EngineCore, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    collectors = [submit(core, request_of(prompt, **sampling))[1] for prompt in prompts]
    run_until_idle(core)
    assert [each.failure for each in collectors] == [None] * len(prompts)
    return [each.token_ids() for each in collectors]


def first_difference(
    executor: Executor,
    prompt: Sequence[int],
    answer: Sequence[int],
    right: Sequence[int],
    *,
    near_tie: float = NEAR_TIE,
) -> str:
    """Return where an answer is not the right one; nothing where they part at a near tie of two tokens in bfloat16.

    There the sums of a step depend on how a prompt was cut and on what is beside it, and a logit between 16 and 32 is
    rounded to 1/8.
    """
    if list(answer) == list(right):
        return ""
    at = next(i for i, (one, other) in enumerate(zip(answer, right, strict=True)) if one != other)
    told = request_of([*prompt, *answer[:at]], max_tokens=1, num_logprobs=20)
    [output] = served(core_of(executor), told).outputs
    assert output.logprobs is not None
    of = dict(output.logprobs.top)
    gap = abs(of[answer[at]] - of[right[at]]) if {answer[at], right[at]} <= of.keys() else math.inf
    is_tie = executor.kv.shape.dtype == "bfloat16" and gap <= near_tie
    return "" if is_tie else f"prompt of {len(prompt)}, token {at}: {answer[at]}, not {right[at]}, {gap:.3f} apart"


def first_differences(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[list[int]],
    right: Sequence[list[int]],
    *,
    near_tie: float = NEAR_TIE,
) -> list[str]:
    found = (first_difference(executor, *each, near_tie=near_tie) for each in zip(prompts, answers, right, strict=True))
    return [each for each in found if each]


@pytest.fixture(scope="session")
def short_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("short-model"))


@pytest.fixture(scope="session")
def int4_model_dir(short_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 bits in groups of 32, as `kvrelay quantize` writes them."""
    from engine.model.checkpoints.quantizing import Rounding, quantize_checkpoint

    folder = tmp_path_factory.mktemp("quantized") / "int4"
    quantize_checkpoint(short_model_dir, folder, Rounding(bits=4, group_size=32), lambda _line: None)
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(100, 40_000) for _ in range(length)] for length in _LENGTHS]


@pytest.fixture(scope="session")
def generated(short_model_dir: Path, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Answers of vLLM's own `LLM.generate` of the short model to `prompts`, by dtype."""
    dtypes = ("float32", "bfloat16")
    answers = generate([(short_model_dir, dtype) for dtype in dtypes], prompts)
    return dict(zip(dtypes, answers, strict=True))


def generate(models: Sequence[tuple[Path, str]], prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Return the answers of vLLM's own `LLM.generate` to prompts, for each model and dtype."""
    jobs = [
        {"model": str(model_dir), "dtype": dtype, "prompts": prompts, "max_tokens": MAX_TOKENS}
        for model_dir, dtype in models
    ]
    command = [sys.executable, "-m", "tests.vllm.generate"]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def shared_names() -> set[str]:
    """Return the names in shared memory, but those that Intel's OpenMP gives to whole processes elsewhere."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("__KMP_")}
