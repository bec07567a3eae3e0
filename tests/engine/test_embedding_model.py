"""Embeddings of SmolLM2's first layers are those of plain `transformers`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.model_files import default_model_dir
from common.pooling import Pooling
from engine.core import EngineCore
from engine.events import Embedded, Started
from engine.loading import load_executor
from engine.options import EngineOptions
from engine.scheduler import SchedulerLimits
from tests.builders import Collector, Floats, granted, make_request, run_until_idle, submit
from tests.clock import ManualClock
from tests.short_model import write_short_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 70, 200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids cut from the license text; all but the first share a beginning."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    text = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")).ids
    return [text[:num_tokens] for num_tokens in LENGTHS]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("short-model"))


@pytest.fixture(scope="module")
def oracle(prompts: list[list[int]], model_dir: Path) -> dict[tuple[int, Pooling], Floats]:
    """Embeddings by length and pooling."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    found: dict[tuple[int, Pooling], Floats] = {}
    for prompt in prompts:
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        found[len(prompt), Pooling.LAST] = hidden[-1]
        found[len(prompt), Pooling.MEAN] = hidden.mean(axis=0)
    return found


@pytest.fixture(scope="module", params=["auto", "torch"])
def executor(request: pytest.FixtureRequest, model_dir: Path) -> Any:
    """The compiled kernels, where there is a compiler, and torch."""
    options = EngineOptions(
        model_dir=model_dir,
        model_name="smollm2",
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=256,
        kernels=request.param,
    )
    return load_executor(options)


def make_core(executor: Any, max_step_tokens: int) -> EngineCore:
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=max_step_tokens, max_running=16, max_waiting=64)
    return EngineCore(executor, limits, ManualClock())


def begin(core: EngineCore, prompt: Sequence[int], pooling: Pooling) -> Collector:
    request = make_request(prompt, block_size=BLOCK_SIZE)
    collector = Collector()
    granted(core.add(replace(request, pooling=pooling), collector))
    return collector


def check(collector: Collector, expected: Floats) -> int:
    """Compare a vector with the oracle's; return the cached tokens of its prompt."""
    (event,) = [event for event in collector.events if isinstance(event, Embedded)]
    np.testing.assert_allclose(event.vector, expected, rtol=2e-3, atol=2e-3)
    cosine = float(event.vector @ expected / np.linalg.norm(event.vector) / np.linalg.norm(expected))
    assert cosine > 1 - 1e-5
    (started,) = [event for event in collector.events if isinstance(event, Started)]
    return started.num_cached_tokens


def test_vectors_equal_transformers_in_chunks_beside_answers(
    executor: Any, oracle: Any, prompts: list[list[int]]
) -> None:
    core, lone = make_core(executor, 48), make_core(executor, 4096)
    request = make_request(prompts[4], block_size=BLOCK_SIZE, max_tokens=6)
    answers = [submit(each, request)[1] for each in (core, lone)]
    running = [(begin(core, prompt, pooling), prompt, pooling) for prompt in prompts for pooling in Pooling]
    run_until_idle(core)
    run_until_idle(lone)
    for collector, prompt, pooling in running:
        check(collector, oracle[len(prompt), pooling])
    assert answers[0].token_ids() == answers[1].token_ids()


def test_vectors_behind_a_cached_prefix_equal_transformers(
    executor: Any, oracle: Any, prompts: list[list[int]]
) -> None:
    core = make_core(executor, 64)
    for pooling, num_cached in ((Pooling.LAST, 192), (Pooling.MEAN, 0)):
        for _ in range(2):
            collector = begin(core, prompts[-1], pooling)
            run_until_idle(core)
            found = check(collector, oracle[len(prompts[-1]), pooling])
        assert found == num_cached
