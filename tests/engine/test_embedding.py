"""Embeddings in the engine: the same vector however a prompt is cut, cached, preempted or mixed with generation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import EngineFault, PromptTooLong
from common.pooling import Pooling
from engine.core import EngineCore
from engine.events import Embedded, Started
from engine.executor import ScheduledSequence
from tests.builders import (
    Collector,
    Floats,
    assert_empty,
    core_on,
    expected_embedding,
    expected_tokens,
    granted,
    make_core,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.engine.driver import Driver, load, load_device, make_sequence
from tests.engine.tiny_models import make_model, make_prompt

POOLINGS = list(Pooling)


def begin(core: EngineCore, prompt: Sequence[int], pooling: Pooling, block_size: int = 4) -> Collector:
    collector = Collector()
    granted(core.add(replace(make_request(prompt, block_size=block_size), pooling=pooling), collector))
    return collector


def vector_of(collector: Collector) -> Floats:
    """Return the vector that a request was answered with, once."""
    (event,) = [event for event in collector.events if isinstance(event, Embedded)]
    return event.vector


def embedded(core: EngineCore, prompt: Sequence[int], pooling: Pooling, block_size: int = 4) -> Floats:
    collector = begin(core, prompt, pooling, block_size)
    run_until_idle(core)
    return vector_of(collector)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("max_step_tokens", [1, 3, 64])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 23])
def test_embedding_is_that_of_the_tokens_however_they_are_cut_into_steps(
    pooling: Pooling, max_steps_in_flight: int, max_step_tokens: int, num_tokens: int
) -> None:
    core = make_core(max_step_tokens=max_step_tokens, max_steps_in_flight=max_steps_in_flight)
    prompt = [i % 7 + 40 for i in range(num_tokens)]
    assert embedded(core, prompt, pooling).tolist() == expected_embedding(prompt, pooling).tolist()
    assert_empty(core)


def test_last_token_of_a_cached_prompt_is_computed_and_the_mean_computes_all() -> None:
    core = make_core()
    prompt = list(range(40, 60))
    first = embedded(core, prompt, Pooling.LAST)
    num_before = core.scheduler.num_computed_tokens
    assert embedded(core, prompt, Pooling.LAST).tolist() == first.tolist()
    assert core.scheduler.num_computed_tokens - num_before == 4
    num_before = core.scheduler.num_computed_tokens
    assert embedded(core, prompt, Pooling.MEAN).tolist() == expected_embedding(prompt, Pooling.MEAN).tolist()
    assert core.scheduler.num_computed_tokens - num_before == 20


def test_prompt_that_was_embedded_is_cached_for_those_that_generate() -> None:
    core = make_core()
    embedded(core, list(range(40, 60)), Pooling.MEAN)
    collector = served(core, request := make_request(range(40, 60)))
    (started,) = [event for event in collector.events if isinstance(event, Started)]
    assert (started.num_cached_tokens, collector.token_ids()) == (16, expected_tokens(request))


def test_prompt_too_long_for_the_model_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="takes 15"):
        begin(make_core(max_model_len=16), [1] * 16, Pooling.LAST)


def test_hidden_states_that_are_not_finite_fail_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    monkeypatch.setattr("engine.fake.hidden_state", lambda _kv: np.full(16, np.nan, np.float32))
    collector = begin(core, [1, 2, 3], Pooling.LAST)
    answer = served(core, request := make_request([5, 6]))
    assert collector.failure is not None
    assert isinstance(collector.failure.error, EngineFault)
    assert answer.token_ids() == expected_tokens(request)
    assert_empty(core)


# ── real executors ──────────────────────────────────────────────────────────────────────────────────────────────────

Load = Callable[..., Any]


reference_model = cache(make_model)


@cache
def reference(name: str, prompt: tuple[int, ...]) -> dict[Pooling, Floats]:
    """Return the embeddings of transformers."""
    with torch.inference_mode():
        body = reference_model(name).base_model
        hidden = body(torch.tensor([list(prompt)])).last_hidden_state[0].float().numpy()
    return {Pooling.LAST: hidden[-1], Pooling.MEAN: hidden.mean(axis=0)}


@pytest.mark.parametrize(
    ("load_it", "name", "options", "max_step_tokens"),
    [
        (load, "llama", {}, 64),
        (load, "llama", {"kernels": "torch"}, 5),
        (load, "qwen3-layer-types", {}, 5),
        (load, "gemma2", {}, 5),
        (load_device, "llama", {}, 5),
        (load_device, "llama", {}, 64),
    ],
)
def test_embeddings_of_every_executor_equal_transformers(
    checkpoint: Callable[[str], Path], load_it: Load, name: str, options: dict[str, Any], max_step_tokens: int
) -> None:
    executor = load_it(checkpoint(name), **options)
    core = core_on(executor, max_step_tokens=max_step_tokens)
    prompts = [make_prompt(num, seed=num) for num in (1, 4, 23, 40)]
    answer = submit(core, make_request([3, 4, 5], ignore_eos=True, max_tokens=20))[1]
    found = [(begin(core, prompt, pooling), prompt, pooling) for prompt in prompts for pooling in POOLINGS]
    run_until_idle(core)
    for collector, prompt, pooling in found:
        expected = reference(name, prompt)[pooling]
        assert executor.hidden_size == len(expected)
        np.testing.assert_allclose(vector_of(collector), expected, atol=2e-4, rtol=1e-4)
    assert len(answer.token_ids()) == 20


def test_executor_leaves_out_what_is_not_asked_for(checkpoint: Callable[[str], Path]) -> None:
    driver = Driver(load(checkpoint("llama")))
    sequence = make_sequence(make_prompt(9))
    sequence.request = replace(sequence.request, pooling=Pooling.LAST)
    sequence.block_table.extend([0, 1, 2])
    (inside,) = driver.executor.launch([ScheduledSequence(sequence, 8, 0)]).results()
    assert inside.pooled is None
