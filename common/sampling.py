"""How tokens are chosen: every sampling parameter is declared here, once.

The fields of `SamplingParams` are the declaration: name, type, default, bounds and meaning. `PARAMETERS` lists them for
everything that is derived from it: the checks of a request, the wire format (common/wire.py), the entries that a
message may hold (common/wire.py), the fields of the HTTP API and its OpenAPI document (router/http/schema.py), the
options of the Python clients, and the tables in docs/client.md and docs/openai.md.

A new parameter is one field here, its type in `SamplingOptions` and its field in proto/kvrelay/v1/sampling.proto.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from common.errors import InvalidRequest
from common.structured_outputs import FIELD, read_structure

MAX_N = 64
MAX_BEAMS = 16
MAX_LOGPROBS = 20
_INT32_MAX = 2**31 - 1


# Types of parameters.
Texts = tuple[str, ...]
Tokens = frozenset[int]
"""A set: looked up for every token of every sample."""
Biases = tuple[tuple[int, float], ...]
"""A number for each of some tokens."""
Json = str
"""The text of a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Declaration of one sampling parameter."""

    name: str
    """Field of `SamplingParams`."""
    option: str
    """Name on the wire, in both APIs and in errors."""
    type: Any
    """Type of the value: float, int, bool, `Texts`, `Tokens`, `Biases` or `Json`."""
    default: Any
    told_default: str | None = None
    """The default in words, where it is no value."""
    meaning: str
    least: float | None = None
    """Smallest number, bias, or length of a string."""
    most: float | None = None
    is_open: bool = False
    """`least` itself is not allowed."""
    max_entries: int | None = None

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty when every value is allowed."""
        entries = "" if self.max_entries is None else f"at most {self.max_entries}"
        if self.least is None or self.most is None:
            return entries
        values = f"{self.least} to {self.most}"
        if self.is_open:
            values = f"more than {self.least}, at most {self.most}"
        if self.type in (Texts, Json):
            values += " characters"
        return f"{entries}, each {values}" if entries else values

    def check(self, value: Any, *, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the option, unless the value is allowed."""
        if self.type in (float, int):
            if value is not None:
                self._check_number(value)
        elif self.type == Json:
            self._check_number(len(value), fault=f"has {len(value)} characters")
        elif self.max_entries is not None:
            if len(value) > self.max_entries:
                raise self._refusal(f"has {len(value)} entries")
            for entry in value:
                self._check_entry(entry, vocab_size)

    def _check_entry(self, entry: Any, vocab_size: int) -> None:
        if self.type == Texts:
            self._check_number(len(entry), fault=f"has an entry of {len(entry)} characters")
            return
        token_id, bias = entry if self.type == Biases else (entry, None)
        if not 0 <= token_id < vocab_size:
            message = f"{self.option}: token {token_id} is not in the vocabulary of {vocab_size}"
            raise InvalidRequest(message, field=f"sampling.{self.option}")
        if bias is not None:
            self._check_number(bias)

    def _check_number(self, value: float, *, fault: str | None = None) -> None:
        assert self.least is not None
        assert self.most is not None
        is_enough = value > self.least if self.is_open else value >= self.least
        if not math.isfinite(value) or not is_enough or value > self.most:
            raise self._refusal(fault or f"is {value}")

    def _refusal(self, fault: str) -> InvalidRequest:
        return InvalidRequest(f"{self.option} {fault}; allowed: {self.allowed}", field=f"sampling.{self.option}")


def _declare(meaning: str, *, default: Any, **declared: Any) -> Any:
    """Return a field of `SamplingParams`; `declared` are further fields of its `Parameter`."""
    return field(default=default, metadata={"meaning": meaning, **declared})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Immutable; `validate` has passed wherever an engine sees one."""

    temperature: float = _declare(
        "Divides the logits; 0 always takes the most probable token.", default=1.0, least=0, most=10
    )
    top_k: int = _declare("Keep only the k most probable tokens; 0 keeps all.", default=0, least=0, most=_INT32_MAX)
    top_p: float = _declare(
        "Keep the smallest set of tokens whose probability reaches it.", default=1.0, least=0, most=1, is_open=True
    )
    min_p: float = _declare(
        "Drop tokens less probable than `min_p` times the most probable one.", default=0.0, least=0, most=1
    )
    repetition_penalty: float = _declare(
        "Divides (positive) or multiplies (negative) the logits of tokens seen in prompt or output.",
        default=1.0,
        least=0,
        most=10,
        is_open=True,
    )
    presence_penalty: float = _declare(
        "Subtracted once from the logits of tokens seen in the output.", default=0.0, least=-2, most=2
    )
    frequency_penalty: float = _declare(
        "Subtracted per occurrence from the logits of tokens seen in the output.", default=0.0, least=-2, most=2
    )
    logit_bias: tuple[tuple[int, float], ...] = _declare(
        "Added to the logits of single tokens.", default=(), least=-100, most=100, max_entries=1024
    )
    seed: int = _declare(
        "Equal seeds give equal answers, on any worker.",
        default=0,
        told_default="drawn by the router, returned in the answer",
        least=0,
        most=2**64 - 1,
    )
    n: int = _declare(
        "Number of independent samples of the prompt, or beams; they share its KV.", default=1, least=1, most=MAX_N
    )
    stop: tuple[str, ...] = _declare(
        "Strings that end a sample; their text is not returned.", default=(), least=1, most=256, max_entries=16
    )
    stop_token_ids: frozenset[int] = _declare(
        "Tokens that end a sample; their text is not returned.", default=frozenset(), max_entries=256
    )
    max_tokens: int = _declare(
        "Largest number of generated tokens per sample; at most what the prompt leaves of `max_model_len` is used.",
        default=256,
        told_default="`router.default_max_tokens`",
        least=1,
        most=_INT32_MAX,
    )
    min_tokens: int = _declare(
        "Smallest number of generated tokens before a stop can end a sample.", default=0, least=0, most=_INT32_MAX
    )
    ignore_eos: bool = _declare("Go on after the model's end-of-sequence token.", default=False)
    num_logprobs: int | None = _declare(
        "Report the log-probability of each generated token and of this many most probable ones.",
        default=None,
        option="logprobs",
        told_default="off",
        least=0,
        most=MAX_LOGPROBS,
    )
    num_prompt_logprobs: int | None = _declare(
        "The same for every prompt token; no cached prefix is used.",
        default=None,
        option="prompt_logprobs",
        told_default="off",
        least=0,
        most=MAX_LOGPROBS,
    )
    include_special_tokens: bool = _declare("Keep special tokens in the text.", default=False)
    detokenize: bool = _declare(
        "Return text; without it tokens come as runs of ids, without stop strings and `logprobs`.", default=True
    )
    structured_outputs: str = _declare(
        "What the answer has to look like: an object with one of the keys `json` (a schema), `json_object`, `regex`,"
        " `choice`, `grammar` (Lark) or `structural_tag`; [see below](#structured-outputs).",
        default="",
        told_default="anything",
        least=0,
        most=1 << 18,
    )
    use_beam_search: bool = _declare(
        "Return the `n` best answers that beam search of width `n` finds, best first, all at its end;"
        " [see below](#beam-search).",
        default=False,
    )
    length_penalty: float = _declare(
        "Beam search divides an answer's log-probability by its length to this power: more prefers longer answers.",
        default=1.0,
        least=-10,
        most=10,
    )
    early_stopping: bool = _declare(
        "Beam search ends with the `n`-th complete answer, even if a better one may follow.", default=False
    )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen, except where beams compete."""
        return self.temperature == 0.0 or self.use_beam_search

    @property
    def has_beams(self) -> bool:
        """Whether the samples are beams that compete with each other. One beam alone is a greedy sample."""
        return self.use_beam_search and self.n > 1

    def end_token_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Return the tokens that end a sample, given the model's own."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids.union(eos_token_ids)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, *, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, unless every value is allowed."""
        for parameter in PARAMETERS:
            value = getattr(self, parameter.name)
            if value != parameter.default:  # nearly all values are defaults, which are allowed
                parameter.check(value, vocab_size=vocab_size)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; max_tokens is {self.max_tokens}", field="sampling.min_tokens"
            )
        if self.structured_outputs:
            read_structure(self.structured_outputs)
            if self.ignore_eos or self.min_tokens:
                raise InvalidRequest(
                    "structured_outputs decides where an answer ends: ignore_eos and min_tokens are not taken with it",
                    field=FIELD,
                )
        self._check_beams(vocab_size)
        if not self.detokenize and self.stop:
            raise InvalidRequest("stop strings are found in text: detokenize must be true", field="sampling.stop")
        if not self.detokenize and self.num_logprobs is not None:
            raise InvalidRequest(
                "runs of tokens carry no log-probabilities: detokenize must be true", field="sampling.logprobs"
            )

    def _check_beams(self, vocab_size: int) -> None:
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != DEFAULTS[name]:
                    raise InvalidRequest(
                        f"{name} is for beam search: set use_beam_search or leave it out", field=f"sampling.{name}"
                    )
            return
        most = min(MAX_BEAMS, vocab_size)
        if self.n > most:
            raise InvalidRequest(f"n is {self.n}; beam search takes 1 to {most}", field="sampling.n")
        for parameter in PARAMETERS:
            if parameter.name in _NOT_WITH_BEAMS and getattr(self, parameter.name) != parameter.default:
                raise InvalidRequest(
                    f"{parameter.option} is not supported with use_beam_search: leave one of them out",
                    field=f"sampling.{parameter.option}",
                )


PARAMETERS: Sequence[Parameter] = tuple(
    Parameter(
        name=each.name,
        type=int if each.type == int | None else each.type,
        default=each.default,
        **{"option": each.name, **each.metadata},
    )
    for each in fields(SamplingParams)
)

DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in PARAMETERS}
_NOT_WITH_BEAMS = frozenset(
    (
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop"),
        *("num_logprobs", "num_prompt_logprobs", "structured_outputs"),
    )
)
"""Parameters that shape or report single tokens of single samples, which beam search does not support."""


class SamplingOptions(TypedDict, total=False):
    """Sampling as the keyword arguments of the Python clients, which docs/client.md explains.

    An option that is left out takes the server's default.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    include_special_tokens: bool
    detokenize: bool
    structured_outputs: str | Mapping[str, Any] | type[Any]
    use_beam_search: bool
    length_penalty: float
    early_stopping: bool
