"""Events of a request, and reports, that an engine emits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import KvrelayError
from common.ids import BlockId, RequestId
from common.kv_events import KvEvents
from common.timing import StepShape
from common.wire_names import FinishReason
from engine.beams import BeamSnapshot
from engine.executor import Hidden, Logprobs
from engine.published import PublishedBlock
from engine.window_ids import NO_WINDOWS, WindowIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first chunk of a prompt is about to be computed."""

    num_cached_tokens: int
    queue_s: float
    num_pulled_tokens: int = 0
    """Cached tokens that were pulled for this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """KV exists for the first `num_computed_tokens` tokens of a prompt that is held for a puller."""

    num_computed_tokens: int
    block_table: tuple[BlockId, ...]
    windows: WindowIds = NO_WINDOWS
    """Window pages at its end, once all tokens are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One generated token."""

    sample_index: int
    token_index: int
    token_id: int
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRun:
    """Consecutive generated tokens of one sample, of several steps that were computed as one."""

    sample_index: int
    first_token_index: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    """Reason why the sample ended with the last token; None: it continues."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens that steps have verified."""

    num_drafted: int = 0
    num_accepted: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.num_drafted + other.num_drafted, self.num_accepted + other.num_accepted)


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one step. The first tokens of a prompt computed here carry the prefill time.

    The first event of beams carries it alone: their tokens come at the end, sample by sample.
    """

    tokens: tuple[TokenOutput, ...] = ()
    runs: tuple[GeneratedRun, ...] = ()
    """Runs that follow `tokens`; only for requests without text."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    prefill_s: float | None = None
    drafts: DraftCounts = NO_DRAFTS
    """Drafts of the request that were verified since its event before."""
    num_pinned_tokens: int = 0
    """Leading tokens that the marks of the request have pinned; with the first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The prompt is computed, and the request holds nothing any more."""

    vector: Hidden
    """Its pooled hidden states, not normalized."""
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamsAdvanced:
    """A beam search has come so far; another engine may go on from here."""

    snapshot: BeamSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request failed and holds nothing any more."""

    error: KvrelayError


EngineEvent = Started | PrefillProgress | Tokens | Embedded | BeamsAdvanced | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's load at one moment."""

    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_blocks: int
    num_cold_blocks: int
    """Free pages that are empty or were never reused."""
    num_free_slots: int
    """Sequences that may still join the batch."""
    num_decoding: int
    """Running sequences that decode."""
    num_context_tokens: int
    """Tokens of all sequences that decode here, now or once their KV is complete."""
    num_pending_prefill_tokens: int
    """Accepted tokens without KV that are probably not in the cache, including those of steps in flight."""
    num_pending_prefill_pairs: int
    """Pairs of such a token and a token that it attends to."""
    num_preemptions: int
    num_cached_tokens: int
    """Prompt tokens found in the cache, since start."""
    num_computed_tokens: int
    """Prompt tokens computed, since start."""
    num_window_pages: int = 0
    """Pages of layers with a window, or of recurrent layers' states."""
    num_promised_window_pages: int = 0
    num_tier_blocks: int = 0
    """Blocks in tiers, those that are in pages, too, included."""
    max_tier_blocks: int = 0
    """The most blocks that the tiers hold; 0: there is none."""
    drafts: tuple[DraftCounts, ...] = ()
    """Draft tokens since start, by their place in the draft."""
    tenant_pins: Mapping[str, int] = field(default_factory=dict)
    """Blocks that each tenant has pinned."""
    num_pinned_blocks: int = 0
    num_evicted_pins: int = 0
    """Pinned blocks that were evicted all the same, since start."""
    measured_s: float
    """Time of the measurement, on the engine's clock."""

    @property
    def num_drafted_tokens(self) -> int:
        """Draft tokens verified, since start."""
        return sum(counts.num_drafted for counts in self.drafts)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted, since start."""
        return sum(counts.num_accepted for counts in self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Duration of one step."""

    shape: StepShape
    seconds: float
    undrafted: StepShape | None = None
    """The step without its drafts; None: it had none."""
    num_accepted: int = 0
    """Drafted tokens that it has accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Changes that a step made beyond single requests."""

    kv_events: KvEvents
    load: EngineLoad
    samples: tuple[StepSample, ...] = ()
    """Steps that ended."""
    accepted: tuple[RequestId, ...] = ()
    """Requests that entered; `load` includes them for the first time."""
    published: tuple[PublishedBlock, ...] = ()
    """Blocks to keep outside the pages, too; see `Engine.report_published`."""
