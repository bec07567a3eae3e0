"""Beam search without pages, batches or schedulers: over the fake engine, as transformers' tensors do it, and by it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from engine.fake_model import choose, context_state
from engine.request import EngineRequest
from tests.builders import expected_kv

NEVER = -1e9


def expected_beams(request: EngineRequest) -> list[list[int]]:
    """Return the fake engine's answers, best first."""
    sampling = request.sampling
    width, longest = sampling.n, sampling.max_tokens
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS_TOKEN_ID})
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    kept: list[tuple[float, list[int]]] = []
    while True:
        table = np.full((len(running), VOCAB_SIZE), NEVER)
        for row, (total, tokens) in enumerate(running):
            for token_id, logprob in _candidates(request, tokens):
                if token_id not in ends or len(tokens) >= sampling.min_tokens:
                    table[row, token_id] = total + logprob
        best = np.argsort(-table.reshape(-1), kind="stable")[: (len(ends) + 2) * width]
        found = [(float(table.reshape(-1)[i]), [*running[i // VOCAB_SIZE][1], int(i % VOCAB_SIZE)]) for i in best]
        length = len(found[0][1])
        is_over = [tokens[-1] in ends or length == longest for _, tokens in found]
        complete = [(total / length**sampling.length_penalty, tokens) for total, tokens in found]
        kept += [each for each, over in zip(complete[:width], is_over, strict=False) if over]
        kept = sorted(kept, key=lambda each: -each[0])[:width]
        running = [each for each, over in zip(found, is_over, strict=True) if not over][:width]
        if not running:
            return [tokens for _, tokens in kept]
        hopeless = len(kept) == width and running[0][0] / length**sampling.length_penalty <= kept[-1][0]
        if hopeless or (sampling.early_stopping and len(kept) == width):
            return [tokens for _, tokens in kept]


def _candidates(request: EngineRequest, generated: list[int]) -> tuple[tuple[int, float], ...]:
    state = context_state(expected_kv([*request.prompt_token_ids, *generated]))
    logprobs = choose(request.sampling, state, sample_index=0, index=len(generated)).logprobs
    assert logprobs is not None
    return logprobs.top


def reference_beams(model: Any, prompt: Sequence[int], *, ends: Sequence[int], **options: Any) -> list[list[int]]:
    """Return all beams of transformers, each up to its end."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_return_sequences=options["num_beams"],
            eos_token_id=list(ends),
            pad_token_id=ends[0],
            **options,
        )[:, len(prompt) :].tolist()
    cuts = [next((i + 1 for i, token in enumerate(beam) if token in ends), len(beam)) for beam in found]
    return [beam[:cut] for beam, cut in zip(found, cuts, strict=True)]
