"""The events of a stream, and the records in them: frozen, without protobuf.

Durations are in seconds, sizes in bytes. A value that does not exist is None, never 0 or "".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from common.wire_names import FinishReason, PlanKind
from kvrelay.client.chat import AnswerFormat, MessageDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The natural logarithm of a token's probability under the unshaped distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log-probabilities at one position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The most probable tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """First event: the request was admitted. A further one follows when its router was lost and another took over."""

    request_id: str
    """Minted by the router; the id in every process's logs."""
    num_prompt_tokens: int
    seed: int
    """Seed in use: the request's, or one that the router drew."""
    fingerprint: str
    """Fingerprint of the model that answers."""
    rendered_unix_s: int
    """Seconds since 1970: time of day for a chat template that writes the date; 0 without a chat."""
    answer_format: AnswerFormat | None
    """How the text of the answer is written; None without a chat."""
    defaults: Mapping[str, float]
    """The server's choice for sampling options that were left out."""
    exact_resume: bool
    """Whether the answer goes on with the tokens that would have come when its worker is lost; else up to near ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSoFar:
    """The tokens of one sample that have arrived."""

    token_ids: tuple[int, ...]
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A duration that is forecast, corrected by the errors of the latest forecasts."""

    expected_s: float
    """Median."""
    low_s: float | None = None
    """Lower end of the interval that holds 80 % of the outcomes; None before enough outcomes are known."""
    high_s: float | None = None
    """Upper end of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """No worker is free for the request: it waits in line. Comes at most once."""

    ttft_forecast: Forecast | None
    """Time from the receipt of the request to the first token; None while there is no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChosen:
    """The router chose workers. A further one follows when a worker was lost and the request moved."""

    kind: PlanKind
    prefill_worker_id: str | None
    """None for a local plan."""
    decode_worker_id: str
    predicted_cached_tokens: int
    """Prompt tokens that the router expects in the cache of the worker that prefills."""
    reason: str
    attempt: int
    """1 for the first plan of the request."""
    source_worker_id: str | None = None
    """Worker that leading blocks are pulled from; None without a pull."""
    num_source_blocks: int = 0
    predicted_ttft_s: float = 0.0
    """Time from the choice to the first token; 0 when the policy predicts none."""
    predicted_tpot_s: float = 0.0
    """Mean gap between tokens; 0 when the policy predicts none."""
    ttft_forecast: Forecast | None = None
    """Time from the receipt of the request to the first token, the wait in line included; None when the policy
    predicts none, or after the first token."""
    line_ttft_forecast: Forecast | None = None
    """The same time as forecast when the request entered the line; None when it did not wait there."""
    tpot_forecast: Forecast | None = None
    """Mean gap between tokens; None when the policy predicts none."""
    shortened_max_tokens: int = 0
    """Longest answer when overload has made it shorter than asked for; 0: as asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Comes once, before the first token, when `prompt_logprobs` is given."""

    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. The tokens of a sample come once each, in order."""

    sample_index: int
    token_index: int
    """Position in that sample's output, from 0."""
    token_id: int
    text: str
    """Text that became certain with this token; may be empty. A sample's text is the concatenation."""
    logprobs: PositionLogprobs | None
    finish_reason: FinishReason | None
    """Set on a sample's last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Consecutive tokens of one sample of a request with `detokenize=False`: like `Token` once each, in order."""

    sample_index: int
    first_token_index: int
    """Position of the first one in that sample's output, from 0."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    """Set on a sample's last run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrite:
    """Tokens that a request has put into the cache for its marks of one duration."""

    ttl_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a finished request."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens of all samples."""
    num_cached_tokens: int
    """Prompt tokens whose KV was in the cache of the worker that prefilled."""
    num_decode_cached_tokens: int
    """Prompt tokens whose KV the decode worker already held, so that they were not transferred."""
    num_pulled_tokens: int = 0
    """Cached tokens that were pulled from another worker for this request."""
    num_drafted_tokens: int = 0
    """Draft tokens that were verified for the answer. Those that were wrong are in no other count."""
    num_accepted_tokens: int = 0
    """Draft tokens that were right: tokens of the answer that took no step of their own."""
    cache_writes: tuple[CacheWrite, ...] = ()
    """Tokens of marked prefixes that were not cached, in whole blocks, by the duration of their marks."""
    num_pinned_tokens: int = 0
    """Leading tokens that the marks have pinned."""
    num_refused_pin_tokens: int = 0
    """Tokens of marked prefixes that could not be pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Durations of a finished request, measured by the router."""

    queue_s: float
    """Admission to the start of prefill."""
    prefill_s: float
    transfer_s: float
    """First to last KV block received by the decode worker."""
    transfer_exposed_s: float
    """The part of the transfer that prefill did not hide."""
    ttft_s: float
    """Request received to first token sent."""
    tpot_s: float | None
    """Mean gap between consecutive tokens of the first sample; None with fewer than two."""
    max_itl_s: float | None
    """Largest gap, recovery pauses included."""
    e2e_s: float
    """Request received to last token sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """KV handed from prefill to decode, all attempts together. All zero for a local plan."""

    num_blocks: int
    """A partly filled last block counts."""
    kv_bytes: int
    transfer_s: float
    exposed_s: float
    transport: str | None
    """"grpc" or "shm"; None when nothing was handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Last event of a successful request."""

    usage: Usage
    timings: RequestTimings
    transfer: TransferStats
    num_attempts: int
    """1 when no worker was lost."""
    seed: int
    """The seed that was used; sending it again repeats the answer."""


Event: TypeAlias = Accepted | Queued | PlanChosen | PromptLogprobs | Token | MessageDelta | TokenRun | Completed
"""Events of a stream, in this order: Accepted, perhaps Queued, PlanChosen, …, Token or TokenRun, …, Completed.

Where the text of a chat's answer has markup, of tool calls or thoughts, a MessageDelta follows each Token that
adds to it."""
