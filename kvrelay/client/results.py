"""Results of the clients' calls, apart from streams: frozen records, without protobuf."""

from dataclasses import dataclass

from common.wire_names import FinishReason
from kvrelay.client.chat import Message
from kvrelay.client.events import PlanChosen, PositionLogprobs, RequestTimings, TransferStats, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One of the n answers to a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[PositionLogprobs, ...] | None
    """One entry for each token, when `logprobs` is given."""
    message: Message | None = None
    """The text without its markup; None without a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A complete answer."""

    request_id: str
    samples: tuple[Sample, ...]
    plans: tuple[PlanChosen, ...]
    """One plan; more when a worker was lost."""
    prompt_logprobs: tuple[PositionLogprobs, ...] | None
    usage: Usage
    timings: RequestTimings
    transfer: TransferStats
    seed: int

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's tokens."""
        return self.samples[0].token_ids

    @property
    def message(self) -> Message | None:
        """The first sample's message."""
        return self.samples[0].message

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.samples[0].finish_reason

    @property
    def plan(self) -> PlanChosen:
        """The plan that brought the answer to its end."""
        return self.plans[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding of one text."""

    request_id: str
    vector: tuple[float, ...]
    """float32 values."""
    model: str
    """Name of the model."""
    fingerprint: str
    """Hash of weights, dtype and KV layout of the model that computed it."""
    plans: tuple[PlanChosen, ...]
    """One plan; more when a worker was lost."""
    usage: Usage
    timings: RequestTimings
    """`ttft_s` and `e2e_s` are the time to the answer."""
    num_attempts: int
    """1 when no worker was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """Token ids, and the text of each."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A served model."""

    name: str
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    vocab_size: int
    fingerprint: str
    """Hash of weights, dtype and KV layout."""
    exact_resume: bool
    """Whether an answer goes on with the tokens that would have come when its worker is lost; else up to near ties."""
