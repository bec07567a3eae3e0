"""The engine core over the device executor: the same tokens as over the CPU's, in batches that run out of pages."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.structured_outputs import structure_text
from engine.core import EngineCore
from engine.request import EngineRequest
from engine.text.grammar import Allowed
from tests.builders import assert_empty, core_on, make_request, run_until_idle, submit
from tests.engine.driver import EveryThird, load, load_device
from tests.engine.overlap import step
from tests.engine.tiny_models import VOCAB_SIZE

STRUCTURE = structure_text({"regex": "any"})


class Forcing(EveryThird):
    """A grammar that also forces two tokens of each five."""

    is_complete = True

    def allowed(self, output: Seq[int]) -> Allowed:
        """See `GrammarState`."""
        (mask,) = super().allowed_along(output, ())
        place = len(output) % 5
        return np.arange(len(mask)) == place if place > 2 else mask

    def allowed_along(self, output: Seq[int], draft: Seq[int]) -> list[Allowed]:
        """See `GrammarState`."""
        return [self.allowed([*output, *draft[:i]]) for i in range(len(draft) + 1)]

    def forced(self, output: Seq[int]) -> int | None:
        """See `GrammarState`."""
        place = len(output) % 5
        return place if place > 2 else None


def make_requests(seed: int, num: int) -> list[EngineRequest]:
    """Return requests with common prefixes, samples, penalties, grammars, stop tokens and short and long answers."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(13)] for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.7, "top_p": 0.8, "stop_token_ids": frozenset(range(40))},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "frequency_penalty": 1.0, "n": 2},
        {"min_tokens": 6, "stop_token_ids": frozenset(range(60))},
    ]
    structured: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 1.5, "n": 2},
    ]
    chosen = [rng.choice([*kinds, *structured]) for _ in range(num)]
    requests = [
        make_request(
            [
                *rng.choice(prefixes)[: rng.randrange(14)],
                *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))),
            ],
            **{"max_tokens": rng.randint(1, 24), "seed": i, **kind},
        )
        for i, kind in enumerate(chosen)
    ]
    is_structured = [any(kind is each for each in structured) for kind in chosen]
    return [_forced(each) if has else each for each, has in zip(requests, is_structured, strict=True)]


def _forced(request: EngineRequest) -> EngineRequest:
    """Return a request with a grammar that no library compiles: a GPU machine has none."""
    grammar: Any = Forcing(VOCAB_SIZE)
    return replace(request, grammar=grammar, sampling=replace(request.sampling, structured_outputs=STRUCTURE))


def answers(core: EngineCore, requests: list[EngineRequest], seed: int) -> list[list[list[int]]]:
    """Submit requests at random moments; return the samples' tokens of each."""
    rng = random.Random(seed)
    collectors = []
    for request in requests:
        collectors.append(submit(core, request)[1])
        for _ in range(rng.randrange(4)):
            step(core)
    run_until_idle(core)
    assert_empty(core)
    return [
        [collector.token_ids(j) for j in range(request.sampling.n)]
        for request, collector in zip(requests, collectors, strict=True)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_core_over_the_device_executor_answers_as_over_the_other(qwen3: Path, seed: int) -> None:
    requests = make_requests(seed, 14)
    limits: dict[str, Any] = {"max_step_tokens": 24, "max_running": 6}
    expected = answers(core_on(load(qwen3, num_blocks=512), **limits), requests, seed)
    core = core_on(load_device(qwen3, num_blocks=20, **limits), **limits)
    assert answers(core, requests, seed) == expected
    assert core.scheduler.num_preemptions > 0
