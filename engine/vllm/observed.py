"""Follows vLLM's steps and cache by the reports of the connector in vLLM's scheduler."""

from collections import deque
from dataclasses import dataclass, field

from common.clock import Clock
from common.kv_events import KvEvents
from common.timing import StepShape
from engine.events import StepSample
from engine.thread import RunningStep
from engine.vllm.cache_mirror import CacheMirror
from engine.vllm.errands import StepBegun, StepEnded


@dataclass(slots=True)
class Observed:
    """See the module."""

    clock: Clock
    mirror: CacheMirror
    running_step: RunningStep | None = None
    """The steps that have not ended, as a watchdog sees them."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that vLLM found in its cache, since start."""
    num_computed_tokens: int = 0
    """Prompt tokens computed, since start."""
    _steps: deque[StepShape] = field(default_factory=deque)

    def begun(self, step: StepBegun) -> KvEvents:
        """Note a step; returns the changes of the cache that came with it."""
        self._steps.append(step.shape)
        self._show()
        self.num_preemptions += len(step.preempted)
        self.num_computed_tokens += step.shape.num_prefill_tokens
        return self.mirror.apply(step)

    def ended(self, step: StepEnded) -> tuple[StepSample, ...]:
        """Note the end of the oldest step; returns its duration unless it was empty."""
        shape = self._steps.popleft()
        self._show()
        return (StepSample(shape=shape, seconds=step.seconds),) if shape != StepShape() else ()

    def _show(self) -> None:
        self.running_step = RunningStep(tuple(self._steps), self.clock.monotonic()) if self._steps else None
