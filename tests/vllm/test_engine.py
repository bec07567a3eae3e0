"""One engine over vLLM's runner: the tokens are those of vLLM's own `LLM.generate`, however its KV came about."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.pooling import Pooling
from engine.events import Embedded, Tokens
from engine.executor import Executor
from engine.loading import load_executor
from engine.model.config import UnsupportedModel
from tests.builders import Collector, assert_empty, granted, run_until_idle, served, submit
from tests.vllm.conftest import (
    BLOCK_SIZE,
    MAX_TOKENS,
    answers_of,
    core_of,
    first_difference,
    first_differences,
    options,
    request_of,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def executor(short_model_dir: Path, dtype: str) -> Executor:
    torch.set_num_threads(1)
    return load_executor(options(short_model_dir, dtype=dtype))


@pytest.fixture(scope="module")
def expected(generated: dict[str, list[list[int]]], dtype: str) -> list[list[int]]:
    return generated[dtype]


def test_greedy_answers_are_those_of_vllm_alone_together_chunked_and_cached(
    executor: Executor, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    core = core_of(executor)
    chunked = core_of(executor, max_step_tokens=9)
    found = {
        "alone": [served(core_of(executor), request_of(prompt)).token_ids() for prompt in prompts],
        "together": answers_of(core, prompts),
        "cached": answers_of(core, prompts),
        "chunked": answers_of(chunked, prompts),
    }
    for how, answers in found.items():
        assert not first_differences(executor, prompts, answers, expected), how


def test_a_sampled_answer_goes_on_with_the_same_tokens_elsewhere(
    executor: Executor, prompts: list[list[int]], dtype: str
) -> None:
    if dtype != "float32":
        pytest.skip("in bfloat16 up to near ties, as docs/engines.md says")
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "frequency_penalty": 0.3}
    whole = served(core_of(executor), request_of(prompts[5], **options)).token_ids()
    for num_before in (1, 11):
        rest = served(core_of(executor), request_of(prompts[5], output=whole[:num_before], **options)).token_ids()
        assert rest == whole[num_before:]


def test_preempted_answers_are_the_same(executor: Executor, prompts: list[list[int]]) -> None:
    alone = [served(core_of(executor), request_of(prompt, max_tokens=40)).token_ids() for prompt in prompts[-3:]]
    core = core_of(executor)
    core.pool.allocate(core.pool.num_blocks - 11)  # three answers need 14 pages
    assert not first_differences(executor, prompts[-3:], answers_of(core, prompts[-3:], max_tokens=40), alone)
    assert core.scheduler.num_preemptions > 0


def test_samples_logprobs_and_prompt_logprobs_come(executor: Executor, prompts: list[list[int]]) -> None:
    options = {"temperature": 1.0, "seed": 3, "n": 3, "num_logprobs": 2, "num_prompt_logprobs": 1, "max_tokens": 5}
    collector = served(core_of(executor), request_of(prompts[4], **options))
    samples = {tuple(collector.token_ids(i)) for i in range(3)}
    assert len(samples) == 3
    assert all(output.logprobs is not None and len(output.logprobs.top) == 2 for output in collector.outputs)


def handed_over(source: Executor, target: Executor, prompt: Sequence[int]) -> list[int]:
    """Return an answer whose prompt one executor computes, and which another one goes on with in other pages."""
    prefill, decode = core_of(source), core_of(target)
    decode.pool.allocate(30)
    sent, collector = Collector(), Collector()
    prefilled = granted(prefill.add_prefill_only(request_of(prompt), sent))
    run_until_idle(prefill)
    reserved = granted(decode.reserve(request_of(prompt), collector))
    num_pages = -(-len(prompt) // BLOCK_SIZE)
    moved_to = reserved.leader.block_ids()[:num_pages]
    assert min(moved_to) >= 30
    target.kv.write_blocks(moved_to, source.kv.read_blocks(prefilled.leader.block_ids()[:num_pages]))
    decode.commit(reserved, len(prompt))
    [first] = sent.token_ids()
    decode.start(reserved, [(first, False)])
    decode.wake()
    run_until_idle(decode)
    return [first, *collector.token_ids()]


def test_pages_handed_over_by_the_wire_give_the_same_answer(executor: Executor, prompts: list[list[int]]) -> None:
    whole = served(core_of(executor), request_of(prompts[-1])).token_ids()
    assert not first_difference(executor, prompts[-1], handed_over(executor, executor, prompts[-1]), whole)


def test_requests_cancelled_at_every_step_leave_nothing_and_others_as_they_were(
    executor: Executor, prompts: list[list[int]]
) -> None:
    """Chunks of the prompt, its last step, the first tokens: the ranks forget a sequence wherever it ends."""
    beside = served(core_of(executor), request_of(prompts[3])).token_ids()
    core = core_of(executor, max_step_tokens=40)
    for num_steps in range(9):
        left, seen = submit(core, request_of(prompts[-1], n=2, temperature=1.0, seed=3))
        _, other = submit(core, request_of(prompts[3]))
        for _ in range(num_steps):
            for group, event in core.step():
                group.sink(event)
        core.cancel(left)
        run_until_idle(core)
        assert len(seen.outputs) < 2 * MAX_TOKENS
        assert not first_difference(executor, prompts[3], other.token_ids(), beside), f"behind {num_steps} steps"
        assert_empty(core)


@pytest.fixture(scope="module")
def own(short_model_dir: Path, dtype: str) -> Executor:
    if dtype != "float32":
        pytest.skip("compared with our own engine in float32")
    return load_executor(dataclasses.replace(options(short_model_dir, dtype=dtype), runner="torch", kernels="torch"))


def test_pages_on_the_wire_are_those_of_our_own_engine(
    executor: Executor, own: Executor, prompts: list[list[int]]
) -> None:
    """Blocks could travel between the engines, but for their fingerprints: the roundings differ."""
    read: list[Any] = []
    for each in (executor, own):
        core = core_of(each)
        group = granted(core.add_prefill_only(request_of(prompts[5]), Collector()))
        run_until_idle(core)
        read.append(np.frombuffer(each.kv.read_blocks(group.leader.block_ids()[:2]), dtype=np.float32))
    assert np.allclose(read[0], read[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["from our own engine", "to our own engine"])
def test_pages_go_on_in_the_other_engine(
    executor: Executor, own: Executor, prompts: list[list[int]], expected: list[list[int]], way: str
) -> None:
    """A cluster does not do this, since fingerprints differ; the form of a block on the wire is the same."""
    source, target = (own, executor) if way == "from our own engine" else (executor, own)
    assert handed_over(source, target, prompts[-1]) == expected[-1]


def test_beams_embeddings_and_logprobs_are_those_of_our_own_engine(
    executor: Executor, own: Executor, prompts: list[list[int]]
) -> None:
    beams: list[Any] = []
    vectors: list[Any] = []
    logprobs: list[Any] = []
    for each in (executor, own):
        core = core_of(each, max_step_tokens=40)
        search = served(core, request_of(prompts[4], n=3, use_beam_search=True, max_tokens=8))
        beams.append([search.token_ids(i) for i in range(3)])
        collector = Collector()
        granted(core.add(dataclasses.replace(request_of(prompts[5]), pooling=Pooling.MEAN), collector))
        run_until_idle(core)
        vectors += [event.vector for event in collector.events if isinstance(event, Embedded)]
        told = served(core, request_of(prompts[6], num_prompt_logprobs=1, num_logprobs=1, max_tokens=4))
        prompt = [each.logprob for event in told.events if isinstance(event, Tokens) for each in event.prompt_logprobs]
        logprobs.append([*prompt, *(output.logprobs.logprob for output in told.outputs if output.logprobs)])
    assert beams[0] == beams[1]
    assert len(vectors[0]) > 0
    assert np.allclose(vectors[0], vectors[1], rtol=1e-3, atol=1e-3)
    assert len(logprobs[0]) == len(prompts[6]) - 1 + 4
    assert np.allclose(logprobs[0], logprobs[1], rtol=1e-3, atol=1e-3)


def test_a_model_whose_state_pages_cannot_carry_is_refused_by_name(short_model_dir: Path, tmp_path: Path) -> None:
    """Sliding windows, which vLLM serves from pages that it frees in the middle of a sequence."""
    model_dir = shutil.copytree(short_model_dir, tmp_path / "windows")
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (model_dir / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="SlidingWindow"):
        load_executor(options(model_dir, dtype="float32"))


def test_norms_are_fused_and_those_of_vllm(executor: Executor) -> None:
    inside: Any = executor
    model = inside._ranks.driver_worker.worker.model_runner.model  # noqa: SLF001
    norm = model.model.layers[1].input_layernorm
    chance = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, norm.hidden_size, generator=chance).to(norm.weight.dtype) for _ in range(2))
    heads = torch.cat([x, residual], dim=1).view(5, 2, -1)[:, :1]  # as a view of wider rows
    nearly: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if x.dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        assert norm._forward_method != norm.forward_native  # noqa: SLF001
        torch.testing.assert_close(norm(heads), norm.forward_native(heads), **nearly)
        expected = norm.forward_native(x.clone(), residual.clone())
        for found, right in zip(norm(x.clone(), residual.clone()), expected, strict=True):
            torch.testing.assert_close(found, right, **nearly)
