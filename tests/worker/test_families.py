"""Prompts of every kind of layer, computed on one worker, answered on another: as transformers answers them alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.builders import BLOCK_SIZE, make_request
from tests.engine.driver import load
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens
from tests.worker.cluster import running_pool
from tests.worker.prefixes import where

pytestmark = pytest.mark.usefixtures("rates_measured_once")

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "gemma3": {},
    "gemma4": {},
    "llama4": {},
    "qwen3_next": {},
    "granite4": {},
    "nemotron_h": {},
}
NUM_TOKENS = 6
LENGTHS = {"shm": [BLOCK_SIZE * 6 + d for d in (-1, 0, 1)], "grpc": [BLOCK_SIZE * 6 + 1]}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a model and its checkpoint."""
    model = make_model(request.param, **FAMILIES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("transport", LENGTHS)
async def test_handed_over_cached_and_pulled_prompts_are_answered_as_by_transformers(
    transport: str, saved: tuple[Any, Path]
) -> None:
    model, folder = saved
    names = ("prefill-0", "prefill-1", "decode-0")
    workers = {name: {"executor": load(folder, num_blocks=80)} for name in names}
    async with running_pool(workers, transports=[transport]) as pool:
        pair, other = pool.pair("prefill-0", "decode-0"), pool.pair("prefill-1", "decode-0")
        for length in LENGTHS[transport]:
            prompt = make_prompt(length, seed=length)
            request = make_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
            answer = (await pair.answer(request)).tokens[0]
            assert answer == reference_tokens(model, prompt, NUM_TOKENS, guess=answer)
            again = await pair.answer(request)
            assert again.tokens[0] == answer
            assert again.num_decode_cached == length // BLOCK_SIZE * BLOCK_SIZE
            turn = [*prompt, *answer, *make_prompt(7, seed=1)]
            pulled = await other.answer(
                make_request(turn, max_tokens=NUM_TOKENS, ignore_eos=True), where(pair.prefill, length // BLOCK_SIZE)
            )
            assert pulled.num_pulled == length // BLOCK_SIZE * BLOCK_SIZE
            found = pulled.tokens[0]
            assert found == reference_tokens(model, turn, NUM_TOKENS, guess=found)
            samples = make_request(prompt, n=3, temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert (await other.answer(samples)).tokens == (await pair.answer_locally(samples)).tokens
