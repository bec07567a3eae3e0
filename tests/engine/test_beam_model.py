"""Beam search on the default model's first layers finds what transformers finds in float32, token for token."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model_files import default_model_dir
from engine import beams
from engine.core import EngineCore
from engine.events import BeamsAdvanced
from engine.runner import ModelExecutor
from engine.scheduler import SchedulerLimits
from tests.builders import Collector, assert_empty, make_request, run_until_idle, served, submit
from tests.clock import ManualClock
from tests.engine.beam_oracle import reference_beams
from tests.engine.driver import load
from tests.short_model import write_short_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
TEXTS = ("The quick brown fox", "What is the capital of France? One word.")
"""A text, and a turn of a chat."""
END = 284
"""" and": so few layers do not end a turn, and this is one of their favourites."""
MAX_TOKENS = 12
WIDTH, LENGTH_PENALTY = 4, 2.0
"""Other searches are those of test_beam_executors.py, on tiny models."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_short_model(tmp_path_factory.mktemp("short"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> ModelExecutor[Any]:
    return load(model_dir, block_size=BLOCK_SIZE, num_blocks=160)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    return auto_model.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> Iterator[list[list[int]]]:
    from transformers import AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    tokenizer = auto_tokenizer.from_pretrained(default_model_dir())
    text, question = TEXTS
    turn = [{"role": "user", "content": question}]
    yield [
        tokenizer(text).input_ids,
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False),
    ]


def test_beams_equal_those_of_transformers(
    executor: ModelExecutor[Any], reference: Any, prompts: list[list[int]]
) -> None:
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=256, max_running=16, max_waiting=16)
    core = EngineCore(executor, limits, ManualClock())
    options = {"length_penalty": LENGTH_PENALTY, "early_stopping": False}
    search: dict[str, Any] = {"use_beam_search": True, "n": WIDTH, "max_tokens": MAX_TOKENS, **options}
    submitted: list[Collector] = []
    for prompt in prompts:  # in one batch
        submitted.append(submit(core, make_request(prompt, block_size=BLOCK_SIZE, **search))[1])
    run_until_idle(core)
    ends = sorted(executor.eos_token_ids)
    assert END in ends
    lengths = set()
    for prompt, collector in zip(prompts, submitted, strict=True):
        found = [collector.token_ids(i) for i in range(WIDTH)]
        wanted = reference_beams(reference, prompt, ends=ends, num_beams=WIDTH, max_new_tokens=MAX_TOKENS, **options)
        assert found == wanted
        lengths |= {len(beam) for beam in found}
    assert min(lengths) < MAX_TOKENS == max(lengths)  # some end, others are cut
    assert_empty(core)


def test_search_that_goes_on_from_any_state_finds_the_same(
    executor: ModelExecutor[Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beams, "SNAPSHOT_TOKENS", 3)
    request = make_request(prompts[1], block_size=BLOCK_SIZE, n=4, use_beam_search=True, max_tokens=MAX_TOKENS)
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=256, max_running=16, max_waiting=16)
    whole = served(EngineCore(executor, limits, ManualClock()), request)
    states = [event.snapshot for event in whole.events if isinstance(event, BeamsAdvanced)]
    assert len(states) > 1
    for state in states:
        rest = served(EngineCore(executor, limits, ManualClock()), replace(request, beams=state))
        assert [rest.token_ids(i) for i in range(4)] == [whole.token_ids(i) for i in range(4)]
