"""The sampler's rules in plain form: one row, one token at a time, NumPy float64."""

import numpy as np
import numpy.typing as npt

from engine.sampling.logits import SamplingRow
from engine.sampling.noise import noise_key

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
    """Return the drawn token: the one with the shortest exponential time divided by its probability."""
    key = noise_key(row.params.seed, row.sample_index, row.token_index)
    arrivals = [
        waiting_time(key, token) / probability if probability else np.inf
        for token, probability in enumerate(distribution(logits, row, eos))
    ]
    return int(np.argmin(arrivals))


def waiting_time(key: int, token_id: int) -> float:
    """Return a token's exponential time: output `token_id` of SplitMix64 from `key`, in plain integers."""
    mask = 2**64 - 1
    bits = (key + (token_id + 1) * 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    bits ^= bits >> 31
    return -float(np.log(((bits >> 12) + 0.5) * 2.0**-52))
