"""Beams on both executors of torch find what transformers finds on the same tiny models, beside other requests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore
from engine.scheduler import SchedulerLimits
from tests.builders import assert_empty, make_request, run_until_idle, submit
from tests.clock import ManualClock
from tests.engine.beam_oracle import reference_beams
from tests.engine.driver import load, load_device
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

Load = Callable[..., Any]
ENDS = (3, 11, 42, 57)
PROMPT_LENS = (1, 4, 9, 23)
MAX_TOKENS = 14
reference_model = cache(make_model)


@cache
def references(
    name: str, width: int, length_penalty: float, early_stopping: bool, min_tokens: int
) -> list[tuple[list[list[int]], list[int]]]:
    """Return for each prompt transformers' beams, and its greedy answer to the reversed prompt."""
    model = reference_model(name)
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    options |= {"min_new_tokens": min_tokens} if min_tokens else {}
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    return [
        (
            reference_beams(model, prompt, ends=ENDS, num_beams=width, max_new_tokens=MAX_TOKENS, **options),
            reference_tokens(model, prompt[::-1], MAX_TOKENS),
        )
        for prompt in prompts
    ]


def make_core(executor: Any) -> EngineCore:
    limits = SchedulerLimits(block_size=4, max_step_tokens=32, max_running=8, max_waiting=64)
    return EngineCore(executor, limits, ManualClock())


@pytest.mark.parametrize("load_it", [load, load_device], ids=["runner", "device"])
@pytest.mark.parametrize("name", ["llama", "qwen3-layer-types"])
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping", "min_tokens"),
    [(2, 0.0, False, 0), (4, 1.0, False, 0), (2, 1.0, True, 0), (4, 2.0, False, 0), (4, -1.0, True, 3)],
)
def test_beams_beside_others_equal_those_of_transformers(
    checkpoint: Callable[[str], Path],
    load_it: Load,
    name: str,
    width: int,
    length_penalty: float,
    early_stopping: bool,
    min_tokens: int,
) -> None:
    core = make_core(load_it(checkpoint(name), num_blocks=96))
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    sampling = options | {"stop_token_ids": frozenset(ENDS), "max_tokens": MAX_TOKENS, "min_tokens": min_tokens}
    works = []
    for prompt in (make_prompt(num, seed=num) for num in PROMPT_LENS):
        beams = submit(core, make_request(prompt, n=width, use_beam_search=True, **sampling))[1]
        greedy = submit(core, make_request(prompt[::-1], max_tokens=MAX_TOKENS))[1]
        works.append((beams, greedy))
    run_until_idle(core)
    wanted = references(name, width, length_penalty, early_stopping, min_tokens)
    found = [([beams.token_ids(i) for i in range(width)], greedy.token_ids()) for beams, greedy in works]
    assert found == wanted
    lengths = {len(beam) for beams, _ in wanted for beam in beams}
    assert len(lengths) > 1 or length_penalty > 1  # which prefers the longest
    assert_empty(core)
