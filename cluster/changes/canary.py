"""Whether a canary may be followed: what a new worker did beside the old ones of its pool. Pure.

In this order:

1. It died more often than any of the others: no.
2. It has run no step: nothing can be said against it, and that is said.
3. Its pace, by the timing model that each worker fits to its own steps, is worse than the others' median by more than
   a factor and a margin: no. Compared is what the pool is for: a prompt of 512 tokens for prefill, the gap between
   tokens for decode, at the load that the canary had. Models, not measured means, since the canary's batches are not
   the others'.
4. Otherwise: yes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cluster.processes.plan import ProcessRole
from common.timing import TimingModel

MARGIN_S = 0.002
"""What no user notices, and what timers and schedulers make of steps that take less."""
_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """What decodes in one step."""

    num_decodes: int = 1
    num_context_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What one worker did while the canary served."""

    name: str
    num_deaths: int
    busy_s: float
    """In which its engine ran steps."""
    timing: TimingModel | None
    """None: it could not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a canary."""

    is_good: bool
    reason: str
    """In words, the worker's name first."""


def judge(
    role: ProcessRole, canary: Conduct, others: Sequence[Conduct], *, load: DecodeLoad, max_slowdown: float
) -> Verdict:
    """Return whether the others of a pool should follow the canary."""
    name = canary.name
    if canary.num_deaths > max((each.num_deaths for each in others), default=0):
        return Verdict(is_good=False, reason=f"{name} died {canary.num_deaths} times")
    if canary.busy_s <= 0:
        return Verdict(is_good=True, reason=f"{name} runs, but no request came its way: no load to judge it by")
    pace_s = _pace_s(role, canary, load)
    known = [pace for each in others if (pace := _pace_s(role, each, load)) is not None]
    if pace_s is None:
        return Verdict(is_good=True, reason=f"{name} served, but too little to judge its pace")
    if not known:
        return Verdict(is_good=True, reason=f"{name} served: {_told(role, pace_s)}; no other has measured itself")
    usual_s = median(known)
    text = f"{name} served: {_told(role, pace_s)}, the others {usual_s * 1000:.1f} ms"
    if pace_s > max_slowdown * usual_s + MARGIN_S:
        return Verdict(is_good=False, reason=f"{text}; allowed is {max_slowdown:g} times as much")
    return Verdict(is_good=True, reason=text)


def _pace_s(role: ProcessRole, worker: Conduct, load: DecodeLoad) -> float | None:
    """Return the seconds of the pool's own work, None where nobody has measured it."""
    timing = worker.timing
    if timing is None:
        return None
    if role is ProcessRole.PREFILL:
        return timing.prefill_s(_PROMPT_TOKENS, 0) if timing.prefill.num_samples else None
    return timing.itl_s(load.num_decodes, load.num_context_tokens) if timing.decode.num_samples else None


def _told(role: ProcessRole, pace_s: float) -> str:
    what = f"{_PROMPT_TOKENS} prompt tokens take" if role is ProcessRole.PREFILL else "a gap between tokens is"
    return f"{what} {pace_s * 1000:.1f} ms"
