"""The model of the fake engine: pure hashes, so that a test predicts any answer without an engine.

The KV of a token is a hash of the token and its position, the state of a context a hash over the KV of its tokens, and
everything that a model would compute from it is made up from that state.
"""

import numpy as np
import numpy.typing as npt

from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from common.sampling import SamplingParams
from engine.beams import num_candidates
from engine.executor import Hidden, Logprobs, Sampled
from engine.sampling.noise import noise_key
from engine.text.grammar import Allowed

U64 = npt.NDArray[np.uint64]
HIDDEN_SIZE = 16
_HIDDEN_STEPS = 1 << 10
"""Values of hidden states are multiples of 1 / this, so that sums over thousands of them are exact in float32."""
_MASK = (1 << 64) - 1
_LETTERS = b"etaoin shrdlu cmfwyp vbgkj qxz .\n"
_EOS_PER_1000 = 8


def token_kv(token_id: int, position: int) -> int:
    """Return the 64-bit KV of a token at a position."""
    return _mix(token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1)


def context_state(kv: U64) -> int:
    """Return a 64-bit state that depends on every value and its place."""
    mixed = (kv ^ (kv >> _29)) * _weights(len(kv))
    return _mix(int(mixed.sum(dtype=np.uint64)))


def _weights(num_tokens: int) -> U64:
    """Return an odd weight for each place of a context."""
    if num_tokens > _MAX_WEIGHTS:
        return _make_weights(num_tokens)
    return _WEIGHTS[:num_tokens]


def _make_weights(num_tokens: int) -> U64:
    odd = np.arange(num_tokens, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return (odd * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


_29 = np.uint64(29)
_MAX_WEIGHTS = 4096
_WEIGHTS = _make_weights(_MAX_WEIGHTS)


def hidden_state(kv: U64) -> Hidden:
    """Return the hidden state of the last of some tokens, made up from the KV of all of them."""
    state, size = context_state(kv), 2 * _HIDDEN_STEPS
    values = [(_mix(state + i) % size - _HIDDEN_STEPS) / _HIDDEN_STEPS for i in range(HIDDEN_SIZE)]
    return np.array(values, np.float32)


def choose(
    sampling: SamplingParams, state: int, *, sample_index: int, index: int, allowed: Allowed | None = None
) -> Sampled:
    """Return a sample's token of an index in the state of its context: any letter, or the end; else what is allowed."""
    if not sampling.is_greedy:
        state = _mix(state ^ noise_key(sampling.seed, sample_index, index))
    if allowed is not None:
        choices = np.flatnonzero(allowed)
        token_id = int(choices[state % len(choices)])
    elif not sampling.ignore_eos and index >= sampling.min_tokens and (state >> 20) % 1000 < _EOS_PER_1000:
        token_id = EOS_TOKEN_ID
    else:
        token_id = _LETTERS[state % len(_LETTERS)]
    if sampling.has_beams:
        return Sampled(token_id=token_id, logprobs=_made_up_candidates(sampling, state))
    if sampling.num_logprobs is None:
        return Sampled(token_id=token_id)
    return Sampled(token_id=token_id, logprobs=made_up_logprobs(state, token_id, sampling.num_logprobs))


def made_up_logprobs(state: int, token_id: int, num_top: int) -> Logprobs:
    """Return made-up but deterministic log-probabilities that follow the pages' content."""
    top = tuple((int(_mix(state + rank) % VOCAB_SIZE), -1.0 - rank - (state % 997) / 997) for rank in range(num_top))
    return Logprobs(token_id=token_id, logprob=-0.5 - (state % 997) / 997, top=top)


def _made_up_candidates(sampling: SamplingParams, state: int) -> Logprobs:
    """Return distinct next tokens of a beam, letters and the end among them, in an order that follows the pages."""
    num_top = num_candidates(sampling, (EOS_TOKEN_ID,), VOCAB_SIZE)
    ends = () if sampling.ignore_eos else (EOS_TOKEN_ID,)
    letters = sorted({*_LETTERS, *ends}, key=lambda token_id: _mix(state ^ token_id))
    others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in letters]
    top = tuple(
        (token_id, -0.2 * (rank + 1) - (_mix(state + rank) % 997) / 9970)
        for rank, token_id in enumerate((letters + others)[:num_top])
    )
    return Logprobs(token_id=top[0][0], logprob=top[0][1], top=top)


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
