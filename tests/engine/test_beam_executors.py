"""Beams on both executors of torch find what transformers finds on the same tiny models, beside other requests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.builders import assert_empty, core_on, make_request, run_until_idle, submit
from tests.engine.beam_oracle import reference_beams
from tests.engine.driver import load, load_device
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

Load = Callable[..., Any]
ENDS = (3, 11, 42, 57)
MAX_TOKENS = 14
reference_model = cache(make_model)


PROMPTS = [make_prompt(num, seed=num) for num in (1, 4, 9, 23)]
SEARCHES = ((2, 0.0, False, 0), (4, 1.0, False, 0), (2, 1.0, True, 0), (4, 2.0, False, 0), (4, -1.0, True, 3))
"""(width, length_penalty, early_stopping, min_tokens); the engine chooses among beams, the executor knows none."""


@cache
def wanted_beams(name: str, *search: Any) -> list[list[list[int]]]:
    """Return transformers' beams behind each prompt."""
    width, length_penalty, early_stopping, min_tokens = search
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping, "num_beams": width}
    options |= {"min_new_tokens": min_tokens} if min_tokens else {}
    model = reference_model(name)
    return [reference_beams(model, each, ends=ENDS, max_new_tokens=MAX_TOKENS, **options) for each in PROMPTS]


@pytest.mark.parametrize(
    ("load_it", "name", "search"),
    [
        *((load, "llama", search) for search in SEARCHES),
        (load_device, "llama", SEARCHES[-1]),
        (load, "qwen3-layer-types", SEARCHES[-1]),
        (load_device, "qwen3-layer-types", SEARCHES[-1]),
    ],
)
def test_beams_beside_others_equal_those_of_transformers(
    checkpoint: Callable[[str], Path], load_it: Load, name: str, search: tuple[int, float, bool, int]
) -> None:
    core = core_on(load_it(checkpoint(name), num_blocks=96))
    width, length_penalty, early_stopping, min_tokens = search
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    sampling = options | {"stop_token_ids": frozenset(ENDS), "max_tokens": MAX_TOKENS, "min_tokens": min_tokens}
    works = []
    for prompt in PROMPTS:
        beams = submit(core, make_request(prompt, n=width, use_beam_search=True, **sampling))[1]
        greedy = submit(core, make_request(prompt[::-1], max_tokens=MAX_TOKENS))[1]
        works.append((beams, greedy))
    run_until_idle(core)
    wanted = wanted_beams(name, *search)
    assert [[beams.token_ids(i) for i in range(width)] for beams, _ in works] == wanted
    for prompt, (_, greedy) in zip(PROMPTS, works, strict=True):
        answer = greedy.token_ids()
        assert answer == reference_tokens(reference_model(name), prompt[::-1], MAX_TOKENS, guess=answer)
    lengths = {len(beam) for beams in wanted for beam in beams}
    assert len(lengths) > 1 or length_penalty > 1  # which prefers the longest
    assert_empty(core)
