"""Fewer bits over processes: answers are those of one engine alone, which reads the same checkpoint in the same bits.

The rule for every format: with the same compiled kernels, a row's projections do not depend on other rows, and a
block's bytes travel as they are. So an answer is the same alone, in a batch, handed over and from a cache. After a
kill its tokens so far are read again as a prompt, whose sums have another order: those tokens stay, and what follows
may differ at a near tie, since a last bit decides now and then between two codes.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import parse_config
from common.sampling import SamplingParams
from engine.ops.select import load_cpu_kernels
from kvrelay.client import Generation
from tests.e2e.harness import killed_midway, running_cluster, until_idle
from tests.short_model import write_short_model
from worker.inprocess import LocalEngine

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

VOCAB_SIZE = 4096
"""Tokens that the model knows: the rest of its vocabulary would be most of the work."""
BF16_BLOCK_BYTES = 4 * 2 * 16 * 3 * 64 * 2
"""Bytes of a block in four layers: keys and values of 16 tokens, 3 heads, 64 dimensions."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 2500, "ignore_eos": True}
NUM_BEFORE = 8
"""Tokens before the kill, at least."""
"""Long enough for a kill in its middle: a token takes about a millisecond."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("formats"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [
        [(7 * i + 13 * j) % (VOCAB_SIZE - 100) + 100 for j in range(length)]
        for i, length in enumerate((5, 33, 200, 64))
    ]


async def test_answers_in_4_bits_handed_over_cached_or_resumed_are_one_engines(
    tmp_path: Path, model_dir: Path, prompts: list[list[int]]
) -> None:
    if load_cpu_kernels(torch.float32) is None:
        pytest.skip("no compiled kernels on this machine: an answer in few bits is the same only up to near ties")
    pool = {"kv_memory_gib": 0.2}
    config: dict[str, Any] = {
        "name": "formats",
        "launcher": "local",
        "model": {"id": str(model_dir), "dtype": "float32", "quantization": "int4", "kv_dtype": "int8"},
        "pools": {"prefill": pool, "decode": pool},
        "router": {"port": 0, "local_prefill_max_tokens": 0},
        "slo": {"ttft_s": 600.0, "tpot_s": 600.0},
    }
    engine = LocalEngine.load(parse_config(config, source="test"))

    def expected(prompt: list[int], options: dict[str, Any]) -> list[int]:
        return [token.token_id for token in engine.stream(prompt, SamplingParams(**options))]

    async with running_cluster(tmp_path, config, timeout_s=120) as client:

        async def answered(options: dict[str, Any]) -> list[Generation]:
            return await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))

        handed_over, cached = await answered(GREEDY), await answered(GREEDY)
        assert [list(answer.token_ids) for answer in handed_over] == [expected(prompt, GREEDY) for prompt in prompts]
        assert [answer.token_ids for answer in cached] == [answer.token_ids for answer in handed_over]
        longest = handed_over[2].transfer
        assert longest.kv_bytes < 0.6 * longest.num_blocks * BF16_BLOCK_BYTES
        assert cached[2].usage.num_cached_tokens == 192

        (killed,) = await killed_midway(client, partial(client.stream, prompts[2], **SAMPLED), num_tokens=NUM_BEFORE)
        assert list(killed.token_ids[:NUM_BEFORE]) == expected(prompts[2], SAMPLED | {"max_tokens": NUM_BEFORE})
        assert len(killed.token_ids) == SAMPLED["max_tokens"]
        await until_idle(client)
