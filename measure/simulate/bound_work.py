"""Least work of each request of a trace: when it can be done, and how much of a worker's time it takes.

See `measure/simulate/bound.py` for the proof that these are lower bounds; the numbers below are its steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from common.slo import Slo
from common.timing import StepModel
from engine.steps.backlog import num_pairs
from measure.workload.traces import Trace, TraceRequest

Floats = npt.NDArray[np.float64]
_SLACK_S = 1e-9
"""Allowance for sums of floating-point times."""


class Charge(Enum):
    """Rule by which the tokens of a step share its fixed time (step 3)."""

    EVEN = "even"
    BY_WORK = "by work"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of a worker's steps and caches."""

    max_step_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """Work and windows of the requests that can be good at all. All arrays [num_requests], in seconds."""

    arrival_s: Floats
    first_due_s: Floats
    """Latest time of the first token."""
    last_due_s: Floats
    """Latest time of the last token."""
    earliest_first_s: Floats
    """Earliest time of the first token."""
    prefill_s: Floats
    """Charge of owned prompt tokens; 0 without any."""
    decode_s: Floats
    """Charge of the tokens after the first; 0 without any."""
    decode_rate: Floats
    """Most of that charge in a second; at most 1."""


@dataclass(slots=True)
class _Block:
    """A block of the trie of prompts."""

    num_tokens: int = 0
    """Most tokens of it that any prompt contains."""
    children: "dict[int, _Block] | None" = None


def owned_from(trace: Trace, block_size: int) -> list[int]:
    """Return for each request the first position that it owns: those before are in full pages of earlier prompts."""
    root = _Block(children={})
    return [_insert(root, trace, request) // block_size * block_size for request in trace.requests]


def _insert(root: _Block, trace: Trace, request: TraceRequest) -> int:
    """Add a prompt to the trie; returns how many leading tokens an earlier prompt shares."""
    num_shared, is_shared, node = 0, True, root
    for segment in trace.segments(request):
        if node.children is None:
            node.children = {}
        child = node.children.setdefault(segment.content, _Block())
        if is_shared:
            num_shared += min(segment.num_tokens, child.num_tokens)
            is_shared = child.num_tokens >= segment.num_tokens
        child.num_tokens = max(child.num_tokens, segment.num_tokens)
        node = child
    return num_shared


def demands(
    trace: Trace, slo: Slo, limits: WorkerLimits, *, charge: Charge, floor: StepModel, floors: Sequence[StepModel]
) -> Demands:
    """Return the work under one charge. All `floors` bound the time that a request's own steps take."""
    rows = np.array(list(_rows(trace, slo, limits, charge=charge, floor=floor, floors=floors)), dtype=np.float64)
    columns = rows.reshape(-1, 7).T
    return Demands(
        arrival_s=columns[0],
        first_due_s=columns[1],
        last_due_s=columns[2],
        earliest_first_s=columns[3],
        prefill_s=columns[4],
        decode_s=columns[5],
        decode_rate=columns[6],
    )


def _rows(
    trace: Trace, slo: Slo, limits: WorkerLimits, *, charge: Charge, floor: StepModel, floors: Sequence[StepModel]
) -> Iterator[tuple[float, ...]]:
    for request, start in zip(trace.requests, owned_from(trace, limits.block_size), strict=True):
        ttft_s = slo.ttft_of(request.num_prompt_tokens)
        prompt = _Prompt(start, request.num_prompt_tokens, limits.block_size)
        own_s = max(prompt.least_s(each, limits) for each in floors)
        answer = _Answer(request, limits, floors)
        num_gaps = request.num_output_tokens - 1
        if own_s > ttft_s + _SLACK_S or answer.least_s > slo.tpot_s * num_gaps + _SLACK_S:
            continue
        decode_s, rate = (0.0, 1.0) if num_gaps == 0 else answer.charged(charge, floor, limits, tpot_s=slo.tpot_s)
        yield (
            request.arrival_s,
            request.arrival_s + ttft_s,
            request.arrival_s + ttft_s + slo.tpot_s * num_gaps,
            request.arrival_s + own_s,
            prompt.charged(charge, floor, limits),
            decode_s,
            rate,
        )


class _Prompt:
    """Owned tokens of a prompt, [start, stop)."""

    def __init__(self, start: int, stop: int, block_size: int) -> None:
        self._num_tokens = stop - start
        self._num_pairs = num_pairs(self._num_tokens, start)
        ends = np.arange(start + block_size, stop + 1, block_size, dtype=np.float64)
        self._ends = ends if stop % block_size == 0 else np.append(ends, stop)
        """Tokens up to each one that may be computed as if it decoded: the last of a page or of the prompt."""

    def _marginal_s(self, floor: StepModel) -> float:
        token_s = floor.per_prefill_token_s + floor.per_prefill_pair_s * self._ends
        saved_s = np.maximum(0.0, token_s - floor.per_decode_s - floor.per_context_token_s * self._ends).sum()
        all_s = floor.per_prefill_token_s * self._num_tokens + floor.per_prefill_pair_s * self._num_pairs
        return float(max(0.0, all_s - saved_s))

    def least_s(self, floor: StepModel, limits: WorkerLimits) -> float:
        """Return the least time of the steps up to the first token, at least one."""
        num_steps = max(1, -(-self._num_tokens // limits.max_step_tokens))
        return floor.constant_s * num_steps + self._marginal_s(floor)

    def charged(self, charge: Charge, floor: StepModel, limits: WorkerLimits) -> float:
        """Return the charge."""
        share_s = floor.constant_s * self._num_tokens / limits.max_step_tokens if charge is Charge.EVEN else 0.0
        return self._marginal_s(floor) + share_s


class _Answer:
    """Tokens of an answer but the first."""

    def __init__(self, request: TraceRequest, limits: WorkerLimits, floors: Sequence[StepModel]) -> None:
        num_gaps = request.num_output_tokens - 1
        self._contexts = np.arange(1, num_gaps + 1, dtype=np.float64) + request.num_prompt_tokens
        """[num_gaps]: tokens that each step reads."""
        self._again = (self._contexts - 1) % limits.block_size + 1
        """[num_gaps]: tokens to compute when the sequence starts again after its last full page."""
        self._step_s = np.max([floor.constant_s + self._marginal_s(floor) for floor in floors], axis=0)
        """[num_gaps]: least time of each step."""

    @property
    def least_s(self) -> float:
        """Least time from the first token to the last."""
        return float(self._step_s.sum())

    def _marginal_s(self, floor: StepModel) -> Floats:
        contexts, again = self._contexts, self._again
        decoded_s = floor.per_decode_s + floor.per_context_token_s * contexts
        pairs = again * (contexts - again) + again * (again + 1) / 2  # as `num_pairs`, of arrays
        computed_s = floor.per_prefill_token_s * again + floor.per_prefill_pair_s * pairs
        return np.where(again > 1, np.minimum(decoded_s, computed_s), decoded_s)

    def charged(self, charge: Charge, floor: StepModel, limits: WorkerLimits, *, tpot_s: float) -> tuple[float, float]:
        """Return the charge, and the most of it in a second. There is at least one gap, and its floor allows it."""
        marginal_s, fixed_s = self._marginal_s(floor), floor.constant_s
        if charge is Charge.EVEN:
            each_s = marginal_s + fixed_s / limits.max_step_tokens
            return float(each_s.sum()), min(1.0, float((each_s / self._step_s).max(initial=0.0)))
        spare_s = len(marginal_s) * (tpot_s - fixed_s)
        share_s = fixed_s * float(np.sqrt(marginal_s).sum()) ** 2 / spare_s if spare_s > 0 else 0.0
        return float(marginal_s.sum()) + share_s, 1.0
