"""vLLM's AsyncLLM as an engine: the tokens are those of vLLM's own `LLM.generate`, however its KV came about."""

import asyncio
import dataclasses
import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from engine.events import Tokens
from engine.steps.group import Group
from engine.text.grammar import Grammars
from engine.vllm.engine import VllmEngine
from engine.vllm.start import start_vllm
from engine.weights.config import UnsupportedModel
from tests.vllm.conftest import (
    Answer,
    answer,
    answers_of,
    computed_for_a_puller,
    first_differences,
    handed_over,
    options,
    pull,
    request_of,
    running_engine,
    until,
    until_empty,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(short_model_dir: Path, dtype: str) -> AsyncIterator[VllmEngine]:
    torch.set_num_threads(1)
    async with running_engine(options(short_model_dir, dtype=dtype)) as running:
        yield running


@pytest.fixture
def in_float32(dtype: str) -> None:
    if dtype != "float32":
        pytest.skip("in bfloat16 up to near ties, as docs/engines.md says")


async def test_greedy_answers_are_those_of_vllm_in_every_way_of_coming_about(
    engine: VllmEngine, prompts: list[list[int]], generated: dict[str, list[list[int]]], dtype: str
) -> None:
    """Prompts of more than 64 tokens are computed in several steps."""
    found = {
        "together": await answers_of(engine, prompts),
        "cached": await answers_of(engine, prompts),
        "alone": [(await answer(engine, request_of(prompt, salt="alone"))).token_ids() for prompt in prompts],
        "handed over": [await handed_over(engine, prompt) for prompt in prompts],
    }
    for how, answers in found.items():
        assert not await first_differences(engine, prompts, answers, generated[dtype]), how


@pytest.mark.usefixtures("in_float32")
async def test_a_sampled_answer_goes_on_with_the_same_tokens_elsewhere(
    engine: VllmEngine, prompts: list[list[int]]
) -> None:
    told: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "frequency_penalty": 0.3}
    whole = (await answer(engine, request_of(prompts[5], **told))).token_ids()
    assert len(set(whole)) > 1
    for num_before in (1, 11):
        rest = await answer(engine, request_of(prompts[5], output=whole[:num_before], **told))
        assert rest.token_ids() == whole[num_before:]
    assert await handed_over(engine, prompts[5], **told) == whole


@pytest.mark.usefixtures("in_float32")
async def test_a_structured_answer_goes_on_with_the_same_text_elsewhere(
    engine: VllmEngine, short_model_dir: Path
) -> None:
    """vLLM alone begins its grammar anew."""
    tokenizer = Tokenizer.from_file(str(short_model_dir / "tokenizer.json"))
    pattern = r"[a-c]{4} is [0-9]{3}-[0-9]{5}\."
    structure = json.dumps({"regex": pattern})
    grammars = Grammars(tokenizer, vocab_size=engine._vllm.vocab_size, eos_token_ids=engine._vllm.eos_token_ids)  # noqa: SLF001
    told: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": False}

    async def ask(output: Sequence[int] = ()) -> list[int]:
        request = request_of([1, 2, 3], output=output, **told)
        sampling = dataclasses.replace(request.sampling, structured_outputs=structure)
        request = dataclasses.replace(request, sampling=sampling, grammar=grammars.compile(structure))
        return (await answer(engine, request)).token_ids()

    whole = await ask()
    assert re.fullmatch(pattern, tokenizer.decode(whole))
    for num_before in (1, len(whole) // 2):
        assert await ask(whole[:num_before]) == whole[num_before:]


async def test_preempted_answers_are_the_same(engine: VllmEngine, prompts: list[list[int]]) -> None:
    """Four answers begin in 20 pages of 24, and grow to 28."""
    four = [prompts[-1][i:] + prompts[-1][:i] for i in range(4)]
    alone = [(await answer(engine, request_of(prompt, max_tokens=70))).token_ids() for prompt in four]
    before = engine.load().num_preemptions
    assert not await first_differences(engine, four, await answers_of(engine, four, max_tokens=70), alone)
    assert engine.load().num_preemptions > before


@pytest.mark.usefixtures("in_float32")
async def test_a_reservation_starts_at_once_also_when_others_have_outgrown_the_pages(
    engine: VllmEngine, prompts: list[list[int]]
) -> None:
    """Beside its three pages four answers have 20 of 24, and grow to 28; it is over before any of them."""
    four = [prompts[-1][i:] + prompts[-1][:i] for i in range(4)]
    alone = await answers_of(engine, four, max_tokens=70, salt="alone")
    right = (await answer(engine, request_of(prompts[6], max_tokens=5))).token_ids()
    sent = await computed_for_a_puller(engine, prompts[6])
    await until(engine, lambda load: not load.num_used_blocks)
    before = engine.load().num_preemptions
    beside = [asyncio.ensure_future(answer(engine, request_of(prompt, max_tokens=70))) for prompt in four]
    received = Answer()
    reserved = asyncio.ensure_future(received.of(engine.reserve, request_of(prompts[6], max_tokens=5, salt="receiver")))
    await until(engine, lambda load: load.num_preemptions > before)
    pull(engine, sent, received.group)
    await reserved
    assert not any(each.done() for each in beside)
    assert [*sent.token_ids(), *received.token_ids()] == right
    assert [(await each).token_ids() for each in beside] == alone


async def test_samples_logprobs_and_prompt_logprobs_are_right(engine: VllmEngine, prompts: list[list[int]]) -> None:
    told = {"temperature": 1.0, "seed": 3, "n": 3, "num_logprobs": 2, "num_prompt_logprobs": 1, "max_tokens": 5}
    found = await answer(engine, request_of(prompts[4], **told))
    assert len({tuple(found.token_ids(i)) for i in range(3)}) == 3
    assert all(output.logprobs is not None and len(output.logprobs.top) == 2 for output in found.outputs)
    prompt = [each for event in found.events if isinstance(event, Tokens) for each in event.prompt_logprobs]
    assert [each.token_id for each in prompt] == prompts[4][1:]
    assert all(each.logprob <= each.top[0][1] <= 0 for each in prompt)


async def test_requests_cancelled_at_any_moment_leave_nothing_and_others_as_they_were(
    engine: VllmEngine, prompts: list[list[int]]
) -> None:
    beside = (await answer(engine, request_of(prompts[3]))).token_ids()
    for num_turns in (0, 1, 5, 30, 200):
        other = asyncio.ensure_future(answer(engine, request_of(prompts[3])))
        for enter in (engine.add, engine.add_prefill_only):
            group = enter(request_of(prompts[-1], n=2, salt=f"{num_turns}"), lambda _event: None)
            assert isinstance(group, Group), group
            for _ in range(num_turns):
                await asyncio.sleep(0)
            engine.cancel(group)
        assert not await first_differences(engine, [prompts[3]], [(await other).token_ids()], [beside])
        await until_empty(engine)


async def test_steps_are_timed_and_blocks_are_named_as_routers_name_them(
    engine: VllmEngine, prompts: list[list[int]]
) -> None:
    request = request_of(prompts[-1], salt="named")
    await answer(engine, request)
    assert set(request.block_hashes) <= set(engine.snapshot().stored)
    assert engine.load().num_cached_blocks == len(engine.snapshot().stored)
    assert engine.load().num_computed_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization"),
        ({"block_size": 16}, "model.vllm.block_size is set by this project"),
        ({"logprobs_mode": "processed_logprobs"}, "model.vllm.logprobs_mode is set by this project"),
        ({"data_parallel_size": 2}, "model.vllm.data_parallel_size is set by this project"),
        ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype|fp8"),
    ],
)
async def test_an_argument_that_vllm_or_the_handoff_does_not_take_is_refused_by_name(
    short_model_dir: Path, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        await asyncio.to_thread(start_vllm, options(short_model_dir, dtype="float32"), arguments)


async def test_a_model_whose_state_pages_cannot_carry_is_refused_by_name(short_model_dir: Path, tmp_path: Path) -> None:
    """Sliding windows beside full attention, which vLLM keeps in groups of their own."""
    model_dir = shutil.copytree(short_model_dir, tmp_path / "windows")
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (model_dir / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="SlidingWindow"):
        await asyncio.to_thread(start_vllm, options(model_dir, dtype="float32"), {})
