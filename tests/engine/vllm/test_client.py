"""Log-probabilities of a long prompt come whole and in order, and leave the event loop to others meanwhile."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from engine.executor import Logprobs
from engine.vllm import client
from engine.vllm.client import AsyncLlmClient
from engine.vllm.errands import Errand

NUM_TOKENS = 2500


class FlatLogprobs(SimpleNamespace):
    """Log-probabilities of a prompt's positions as vLLM gives them; the first position has none."""

    def __len__(self) -> int:
        return len(self.start_indices)


TOLD = FlatLogprobs(
    start_indices=[0, *range(0, 2 * (NUM_TOKENS - 1), 2)],
    end_indices=[0, *range(2, 2 * NUM_TOKENS, 2)],
    token_ids=[token_id for i in range(1, NUM_TOKENS) for token_id in (i, 7)],
    logprobs=[value for i in range(1, NUM_TOKENS) for value in (-float(i), -0.5)],
)


class Llm:
    """An AsyncLLM that answers a prompt at once, with one token."""

    async def add_request(self, *_told: Any) -> Any:
        completion = SimpleNamespace(token_ids=[9], logprobs=None, finish_reason="length")
        output = SimpleNamespace(outputs=[completion], prompt_logprobs=TOLD, finished=True)
        return SimpleNamespace(get_nowait=lambda: output)


async def test_a_long_prompts_logprobs_come_in_order_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_params", lambda _spec: None)
    spec: Any = SimpleNamespace(errand=Errand(key=1), token_ids=array("I", [0]), salt="")
    num_turns = 0

    async def work_beside() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(work_beside())
    found: list[Logprobs] = []
    turns: list[int] = []
    async for output in AsyncLlmClient(Llm()).generate(spec):
        turns.append(num_turns)
        found += output.prompt_logprobs
    beside.cancel()
    assert found == [Logprobs(token_id=i, logprob=-float(i), top=((7, -0.5),)) for i in range(1, NUM_TOKENS)]
    assert len(turns) == len(set(turns)) > NUM_TOKENS // 1024, "others have a turn between any two parts"
    assert output.token_ids == (9,)
