"""Timing models: workers fit them, routers decide by them, and the simulator runs on them.

The time of an engine step is a weighted sum of its contents. Steps with prompt tokens are bound by arithmetic, steps
that only decode by memory, so each kind has its own weights. Prompts are computed in chunks of the step budget.

    step     = constant + a·prompt tokens + b·pairs of a prompt token and a token that it attends to
             + c·decoding sequences + d·their KV tokens
    transfer = latency + bytes / bandwidth; likewise a read from a tier
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TypeVar

from common.ids import WorkerId
from common.wire import check_number, message_of
from kvrelay.v1 import worker_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Contents of one engine step."""

    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    """Sum over the step's prompt tokens of the tokens each attends to, including itself."""
    num_decodes: int = 0
    num_context_tokens: int = 0
    """KV tokens that the decoding sequences read."""


MIN_SAMPLES = 8
"""Steps from which a fit counts as a measurement; one of fewer steps is a corrected estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Time of steps of one kind, in seconds."""

    constant_s: float
    per_prefill_token_s: float = 0.0
    per_prefill_pair_s: float = 0.0
    per_decode_s: float = 0.0
    per_context_token_s: float = 0.0
    num_samples: int = 0
    """Steps of the fit; 0: an estimate, or given."""

    @property
    def is_measured(self) -> bool:
        """Whether its fit has enough steps to judge a worker by it."""
        return self.num_samples >= MIN_SAMPLES

    def seconds(self, shape: StepShape) -> float:
        """Return the predicted time of one step."""
        return (
            self.constant_s
            + self.per_prefill_token_s * shape.num_prefill_tokens
            + self.per_prefill_pair_s * shape.num_prefill_pairs
            + self.per_decode_s * shape.num_decodes
            + self.per_context_token_s * shape.num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """Time of a pull from one peer, in seconds."""

    latency_s: float
    bytes_per_s: float
    num_samples: int = 0

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted time of a pull."""
        return self.latency_s + num_bytes / self.bytes_per_s


GUESSED_LINK = LinkModel(latency_s=1e-3, bytes_per_s=1e9)
"""Assumed until some worker has pulled: a round figure, not a measurement. Pulls correct it from the first on
(worker/timing.py), also for workers that have not pulled yet (router/fleet/pool_timing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """Timing model of one worker."""

    prefill: StepModel
    """Steps with prompt tokens."""
    decode: StepModel
    """Steps that only decode."""
    max_step_tokens: int
    """Token budget of one step; longer prompts are split."""
    gap: StepModel | None = None
    """Time in which each decoding sequence gets a token, where a step may bring several: with speculation, by the
    sequences that decode, not by the rows of a step. None: a step that only decodes."""
    links: Mapping[WorkerId | None, LinkModel] = field(default_factory=dict)
    """Links by source worker; None: any other source."""
    tier_read: LinkModel | None = None
    """Reads from the worker's own tiers into its pages; None: none was measured."""

    def step_s(self, shape: StepShape) -> float:
        """Return the predicted time of one step."""
        return self.kind_of(shape).seconds(shape)

    def kind_of(self, shape: StepShape) -> StepModel:
        """Return the model of the kind of a step."""
        return self.prefill if shape.num_prefill_tokens else self.decode

    def prefill_s(
        self, num_new_tokens: int, num_cached_tokens: int, *, num_decodes: int = 0, num_context_tokens: int = 0
    ) -> float:
        """Return the predicted time to compute a prompt's tokens after `num_cached_tokens` cached ones.

        `num_decodes` sequences with `num_context_tokens` KV tokens decode in the same steps and use part of the budget.
        """
        pairs = num_new_tokens * num_cached_tokens + num_new_tokens * (num_new_tokens + 1) // 2
        return self.prompts_s(num_new_tokens, pairs, num_decodes=num_decodes, num_context_tokens=num_context_tokens)

    def prompts_s(
        self, num_new_tokens: int, num_pairs: int, *, num_decodes: int = 0, num_context_tokens: int = 0
    ) -> float:
        """Return the same for any number of prompts with `num_pairs` of a new token and one that it attends to."""
        if num_new_tokens <= 0:
            return 0.0
        num_steps = self.num_prefill_steps(num_new_tokens, num_decodes=num_decodes)
        model = self.prefill
        per_step = model.constant_s + model.per_decode_s * num_decodes + model.per_context_token_s * num_context_tokens
        return num_steps * per_step + model.per_prefill_token_s * num_new_tokens + model.per_prefill_pair_s * num_pairs

    def num_prefill_steps(self, num_new_tokens: int, *, num_decodes: int = 0) -> int:
        """Return the number of steps for prompt tokens while `num_decodes` sequences decode."""
        return -(-num_new_tokens // max(1, self.max_step_tokens - num_decodes))

    def chunk_within(self, step_s: float, *, num_before: int, beside: StepShape) -> int:
        """Return how many tokens of a prompt, after `num_before`, can join `beside` in a step of `step_s`."""
        model = self.prefill
        left_s = step_s - model.seconds(beside)
        if left_s <= 0:
            return 0
        # The positive root of left_s = linear·t + square·t².
        linear = model.per_prefill_token_s + model.per_prefill_pair_s * num_before
        square = model.per_prefill_pair_s / 2
        reached = linear + math.sqrt(linear * linear + 4 * square * left_s)
        return self.max_step_tokens if reached == 0 else min(self.max_step_tokens, int(2 * left_s / reached))

    def itl_s(self, num_decodes: int, num_context_tokens: int) -> float:
        """Return the predicted gap between tokens of a batch that only decodes."""
        shape = StepShape(num_decodes=num_decodes, num_context_tokens=num_context_tokens)
        return self.token_gap.seconds(shape)

    @property
    def token_gap(self) -> StepModel:
        """The model of the gap between tokens of a batch that only decodes."""
        return self.gap or self.decode

    def pull_s(self, peer: WorkerId | None, num_bytes: float) -> float:
        """Return the predicted time to pull bytes from a peer."""
        if num_bytes <= 0:
            return 0.0
        link = self.links.get(peer) or self.links.get(None) or GUESSED_LINK
        return link.seconds(num_bytes)

    def tier_read_s(self, num_bytes: float) -> float:
        """Return the predicted time to read bytes from the worker's own tiers, while it reads nothing else."""
        return (self.tier_read or GUESSED_LINK).seconds(num_bytes) if num_bytes > 0 else 0.0


TYPICAL_CHUNK = StepShape(num_prefill_tokens=512, num_prefill_pairs=512 * 2048)
TYPICAL_BATCH = StepShape(num_decodes=16, num_context_tokens=16 * 1024)
"""Steps by which models of a pool are compared."""
SMALL_CHUNK = StepShape(num_prefill_tokens=64, num_prefill_pairs=64 * 64)
SMALL_BATCH = StepShape(num_decodes=1, num_context_tokens=512)
"""The same for workers that may have run nothing larger: what a model says of larger steps is then half a guess."""

_Model = TypeVar("_Model")


def median_model(models: Sequence[_Model], measure: Callable[[_Model], float]) -> _Model:
    """Return the model whose measure is the median: medians of single weights would describe no worker."""
    middle = median_low(map(measure, models))
    return next(model for model in models if measure(model) == middle)


GUESSED_TIMING = TimingModel(
    prefill=StepModel(constant_s=5e-3, per_prefill_token_s=1e-4, per_decode_s=1e-4),
    decode=StepModel(constant_s=5e-3, per_decode_s=1e-4, per_context_token_s=1e-7),
    max_step_tokens=512,
)
"""Assumed of a worker that can measure neither its device nor, yet, its steps; only its proportions matter then."""


STEP_WEIGHTS = ("constant_s", "per_prefill_token_s", "per_prefill_pair_s", "per_decode_s", "per_context_token_s")
"""Fields of a `StepModel` that weigh a step's contents, in order."""
_LONGEST_S = 3600.0
"""Longest plausible time of one step."""
_MAX_STEP_TOKENS = 1 << 24
MAX_LINKS = 4096


def timing_to_proto(model: TimingModel, transports: Mapping[WorkerId, int]) -> worker_pb2.TimingReport:
    """Return the message; `transports` holds the transport to each peer."""
    return worker_pb2.TimingReport(
        prefill=message_of(worker_pb2.StepModel, model.prefill),
        decode=message_of(worker_pb2.StepModel, model.decode),
        links=[
            worker_pb2.LinkModel(
                peer_worker_id=peer or "",
                transport=worker_pb2.KvTransport.ValueType(0 if peer is None else transports.get(peer, 0)),
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
                num_samples=link.num_samples,
            )
            for peer, link in model.links.items()
        ],
        max_step_tokens=model.max_step_tokens,
        gap=None if model.gap is None else message_of(worker_pb2.StepModel, model.gap),
        tier_read=None if model.tier_read is None else message_of(worker_pb2.TierReadModel, model.tier_read),
    )


def timing_from_proto(message: worker_pb2.TimingReport) -> TimingModel:
    """Return the record. Raises ValueError, naming the field, for values that no measurement can yield."""
    if not 1 <= message.max_step_tokens <= _MAX_STEP_TOKENS:
        raise ValueError(f"timing.max_step_tokens is {message.max_step_tokens}; allowed are 1 to {_MAX_STEP_TOKENS}")
    if len(message.links) > MAX_LINKS:
        raise ValueError(f"timing.links has {len(message.links)} entries; at most {MAX_LINKS}")
    return TimingModel(
        prefill=_step_from_proto(message.prefill, "timing.prefill"),
        decode=_step_from_proto(message.decode, "timing.decode"),
        max_step_tokens=message.max_step_tokens,
        gap=_step_from_proto(message.gap, "timing.gap") if message.HasField("gap") else None,
        links={
            WorkerId(link.peer_worker_id) if link.peer_worker_id else None: _link_from_proto(link, f"timing.links[{i}]")
            for i, link in enumerate(message.links)
        },
        tier_read=_link_from_proto(message.tier_read, "timing.tier_read") if message.tier_read.bytes_per_s else None,
    )


def _step_from_proto(message: worker_pb2.StepModel, field: str) -> StepModel:
    weights = {
        name: check_number(getattr(message, name), f"{field}.{name}", highest=_LONGEST_S) for name in STEP_WEIGHTS
    }
    return StepModel(**weights, num_samples=message.num_samples)


def _link_from_proto(message: worker_pb2.LinkModel | worker_pb2.TierReadModel, field: str) -> LinkModel:
    bytes_per_s = check_number(message.bytes_per_s, f"{field}.bytes_per_s", highest=math.inf)
    if bytes_per_s == 0:
        raise ValueError(f"{field}.bytes_per_s is 0")
    return LinkModel(
        latency_s=check_number(message.latency_s, f"{field}.latency_s", highest=_LONGEST_S),
        bytes_per_s=bytes_per_s,
        num_samples=message.num_samples,
    )
