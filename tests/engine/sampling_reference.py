"""The sampler's rules, written down a second time: one row, one token at a time, NumPy float64, no cleverness."""

import numpy as np
import numpy.typing as npt

from engine.noise import uniform
from engine.sampler import SamplingRow

F64 = npt.NDArray[np.float64]


def shaped_logits(logits: npt.NDArray[np.float32], row: SamplingRow, eos: frozenset[int]) -> F64:
    """Return the logits after bias, min_tokens and penalties."""
    params = row.params
    shaped = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        shaped[token] += bias
    if row.token_index < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            shaped[token] = -np.inf
    output = list(row.output_token_ids)
    for token in {*row.prompt_token_ids, *output}:
        penalty = params.repetition_penalty
        shaped[token] = shaped[token] / penalty if shaped[token] > 0 else shaped[token] * penalty
    for token in set(output):
        shaped[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return shaped


def distribution(logits: npt.NDArray[np.float32], row: SamplingRow, eos: frozenset[int]) -> F64:
    """Return the probabilities [vocab] from which the row's token is drawn."""
    params = row.params
    shaped = shaped_logits(logits, row, eos)
    order = sorted(range(len(shaped)), key=lambda token: (-shaped[token], token))
    weights = np.zeros(len(shaped))
    if params.is_greedy:
        weights[order[0]] = 1.0
        return weights
    for token in order[: params.top_k or None]:
        weights[token] = np.exp((shaped[token] - shaped[order[0]]) / params.temperature)
    weights /= weights.sum()
    if params.top_p < 1.0:
        mass = 0.0
        for token in order:
            if mass >= params.top_p:
                weights[token] = 0.0
            mass += weights[token]
    weights[weights < params.min_p * weights.max()] = 0.0
    probabilities: F64 = weights / weights.sum()
    return probabilities


def choice(logits: npt.NDArray[np.float32], row: SamplingRow, eos: frozenset[int]) -> int:
    """Return the drawn token: the first in id order whose cumulative probability exceeds the noise."""
    noise = uniform(row.params.seed, row.sample_index, row.token_index)
    cumulative = 0.0
    for token, probability in enumerate(distribution(logits, row, eos)):
        cumulative += probability
        if cumulative > noise:
            return token
    raise AssertionError("noise beyond the distribution")
