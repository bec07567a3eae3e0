"""How a request wants its tokens chosen: the validated record."""

import math
from dataclasses import dataclass

from common.errors import InvalidRequest

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Immutable; `validate` has passed wherever an engine sees one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Looked up for every token of every sample."""
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    include_special_tokens: bool = False
    detokenize: bool = True
    """Whether text is wanted; else tokens come as runs of ids, without log-probabilities."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, *, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, unless every value is allowed."""
        _in_range("temperature", self.temperature, 0.0, 10.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _positive("top_p", self.top_p, 1.0)
        _positive("repetition_penalty", self.repetition_penalty, 10.0)
        _in_range("seed", self.seed, 0, 2**64 - 1)
        _in_range("n", self.n, 1, MAX_N)
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, top in (("logprobs", self.num_logprobs), ("prompt_logprobs", self.num_prompt_logprobs)):
            if top is not None:
                _in_range(name, top, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS}", field="sampling.stop")
        for stop in self.stop:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(stop)} characters; allowed are 1 to {MAX_STOP_CHARS}",
                    field="sampling.stop",
                )
        if not self.detokenize:
            self._validate_without_text()
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"{len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}", field="sampling.logit_bias"
            )
        for token_id, bias in self.logit_bias:
            _token("logit_bias", token_id, vocab_size)
            _in_range("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"{len(self.stop_token_ids)} tokens; at most {MAX_STOP_TOKENS}", field="sampling.stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            _token("stop_token_ids", token_id, vocab_size)

    def _validate_without_text(self) -> None:
        if self.stop:
            raise InvalidRequest("stop strings are found in text: detokenize must be true", field="sampling.stop")
        if self.num_logprobs is not None:
            raise InvalidRequest(
                "runs of tokens carry no log-probabilities: detokenize must be true", field="sampling.logprobs"
            )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; allowed are {low} to {high}", field=f"sampling.{name}")


def _positive(name: str, value: float, high: float) -> None:
    if not math.isfinite(value) or not 0 < value <= high:
        raise InvalidRequest(f"{name} is {value}; allowed is more than 0 and at most {high}", field=f"sampling.{name}")


def _token(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{name}: token {token_id} is not in the vocabulary of {vocab_size}", field=f"sampling.{name}"
        )
