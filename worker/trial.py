"""A trial: fixed prompts that a worker computes like a request, so that its controller can compare the answers with
those of its peers.

Their blocks are named under a root that nothing else has, so that no cached block is used and none is found later: what
the worker computes, stores and reads back now is what the answers show. They are greedy, and equal on every worker of
a model.
"""

import asyncio
import os
from itertools import cycle, islice

from common.block_hash import ROOT_BYTES, hash_blocks
from common.ids import HashRoot, mint_request_id
from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens
from engine.events import EngineEvent, Failed, Tokens
from engine.request import EngineRequest, Retention
from worker.runtime import WorkerRuntime

PROMPTS = (
    "The capital of France is Paris, the capital of Italy is Rome, the capital of Japan is Tokyo, and the capital of",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Water freezes at zero degrees Celsius and boils at one hundred degrees. Ice floats because it is less dense than",
)
NUM_PROMPT_TOKENS = (64, 128, 256, 512)
"""Lengths of the prompts, whose text is repeated: the worker's timing model learns from them as from real ones."""


async def run_trial(runtime: WorkerRuntime, *, num_tokens: int) -> list[list[int]]:
    """Return the first `num_tokens` tokens of the answer to each prompt, one after the other. Raises KvrelayError."""
    kv, tokenizer = runtime.executor.kv, runtime.tokenizer
    num_fitting = min(runtime.executor.max_model_len, kv.num_blocks // 2 * kv.shape.block_size) - num_tokens
    answers = []
    with runtime.calls.transfer():
        for text, num_prompt_tokens in zip(PROMPTS, NUM_PROMPT_TOKENS, strict=True):
            once = tokenizer.encode(text, add_special_tokens=False).ids
            prompt = islice(cycle(once), max(1, min(num_prompt_tokens, num_fitting)))
            answers.append(await _answer(runtime, as_tokens(list(prompt)), num_tokens))
    return answers


async def _answer(runtime: WorkerRuntime, prompt: TokenArray, num_tokens: int) -> list[int]:
    root = HashRoot(os.urandom(ROOT_BYTES))
    request = EngineRequest(
        request_id=mint_request_id(),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False),
        hash_root=root,
        block_hashes=hash_blocks(prompt, root=root, block_size=runtime.executor.kv.shape.block_size),
        retention=Retention.BRIEF,
    )
    events: asyncio.Queue[EngineEvent] = asyncio.Queue()  # bounded by the answer
    group = await runtime.admit(lambda core: core.add(request, events.put_nowait))
    answer: list[int] = []
    try:
        while len(answer) < num_tokens:
            match await events.get():
                case Tokens(tokens=tokens, runs=runs):
                    answer += [token.token_id for token in tokens]
                    answer += [token_id for run in runs for token_id in run.token_ids]
                case Failed(error=error):
                    raise error
    finally:
        runtime.engine.post(lambda core: core.cancel(group))
    return answer
