"""How tokens are chosen: every sampling parameter is declared here, once.

The fields of `SamplingParams` are the declaration: name, type, default, bounds and meaning. `PARAMETERS` lists them for
everything that is derived from it: the checks of a request, the wire format (common/wire.py), the entries that a
message may hold (common/wire.py), the fields of the HTTP API and its OpenAPI document (router/http/schema.py), the
options of the Python clients, and the table in docs/client.md.

A new parameter is one field here, its type in `SamplingOptions` and its field in proto/kvrelay/v1/sampling.proto; tests
then ask for its row in the table, for its values in tests/router/http/field_values.py, and for a batch in which the
device's sampler agrees with the CPU's. In an engine it is a step of engine/sampling/; one that filters probabilities is
a column of draw.py and of its twin in C++, engine/ops/cpu/draw.h, and `races` in draw.py must know it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from common.errors import InvalidRequest
from common.parameter import Parameter, declare
from common.structured_outputs import FIELD, read_structure

MAX_N = 64
MAX_BEAMS = 16
MAX_LOGPROBS = 20
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Immutable; `validate` has passed wherever an engine sees one."""

    temperature: float = declare(
        "Divides the logits; 0 always takes the most probable token.", default=1.0, least=0, most=10
    )
    top_k: int = declare("Keep only the k most probable tokens; 0 keeps all.", default=0, least=0, most=_INT32_MAX)
    top_p: float = declare(
        "Keep the smallest set of tokens whose probability reaches it.", default=1.0, least=0, most=1, is_open=True
    )
    min_p: float = declare(
        "Drop tokens less probable than `min_p` times the most probable one.", default=0.0, least=0, most=1
    )
    repetition_penalty: float = declare(
        "Divides (positive) or multiplies (negative) the logits of tokens seen in prompt or output.",
        default=1.0,
        least=0,
        most=10,
        is_open=True,
    )
    presence_penalty: float = declare(
        "Subtracted once from the logits of tokens seen in the output.", default=0.0, least=-2, most=2
    )
    frequency_penalty: float = declare(
        "Subtracted per occurrence from the logits of tokens seen in the output.", default=0.0, least=-2, most=2
    )
    logit_bias: tuple[tuple[int, float], ...] = declare(
        "Added to the logits of single tokens.", default=(), least=-100, most=100, max_entries=1024
    )
    seed: int = declare(
        "Equal seeds give equal answers, on any worker.",
        default=0,
        documented_default="drawn by the router, returned in the answer",
        least=0,
        most=2**64 - 1,
    )
    n: int = declare(
        "Number of independent samples of the prompt, or beams; they share its KV.", default=1, least=1, most=MAX_N
    )
    stop: tuple[str, ...] = declare(
        "Strings in an answer's content, not in its thoughts or calls, that end a sample; their text is not returned.",
        default=(),
        least=1,
        most=256,
        max_entries=16,
    )
    stop_token_ids: frozenset[int] = declare(
        "Tokens that end a sample; their text is not returned.", default=frozenset(), max_entries=256
    )
    max_tokens: int = declare(
        "Largest number of generated tokens per sample; at most what the prompt leaves of `max_model_len` is used.",
        default=_INT32_MAX,
        documented_default="`router.default_max_tokens`, or what the prompt leaves",
        least=1,
        most=_INT32_MAX,
    )
    min_tokens: int = declare(
        "Smallest number of generated tokens before a stop can end a sample.", default=0, least=0, most=_INT32_MAX
    )
    ignore_eos: bool = declare("Go on after the model's end-of-sequence token.", default=False)
    num_logprobs: int | None = declare(
        "Report the log-probability of each generated token and of this many most probable ones.",
        default=None,
        option="logprobs",
        documented_default="off",
        least=0,
        most=MAX_LOGPROBS,
    )
    num_prompt_logprobs: int | None = declare(
        "The same for every prompt token; no cached prefix is used.",
        default=None,
        option="prompt_logprobs",
        documented_default="off",
        least=0,
        most=MAX_LOGPROBS,
    )
    include_special_tokens: bool = declare("Keep special tokens in the text.", default=False)
    detokenize: bool = declare(
        "Return text; without it tokens come as runs of ids, without stop strings and `logprobs`.", default=True
    )
    structured_outputs: str = declare(
        "What the answer has to look like: an object with one of the keys `json` (a schema), `json_object`, `regex`,"
        " `choice`, `grammar` (Lark) or `structural_tag`; [see below](#structured-outputs).",
        default="",
        documented_default="anything",
        least=0,
        most=1 << 18,
    )
    use_beam_search: bool = declare(
        "Return the `n` best answers that beam search of width `n` finds, best first, all at its end;"
        " [see below](#beam-search).",
        default=False,
    )
    length_penalty: float = declare(
        "Beam search divides an answer's log-probability by its length to this power: more prefers longer answers.",
        default=1.0,
        least=-10,
        most=10,
    )
    early_stopping: bool = declare(
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
