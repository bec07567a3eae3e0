"""Whether a worker reads blocks from its tiers, or computes them since that is sooner.

Routers plan by the same rates, but not all of them do, and a plan is older than the worker's own measurements.

The rule: blocks are read unless the fitted rate of at least `MIN_SAMPLES` reads says that they come later than what the
worker would compute, its line included. A tier that was slow is tried again: one read once there was none for
`TRY_AGAIN_S`, and the next one at once when it came sooner than predicted and than computing, until the rate follows.
"""

import math
from collections.abc import Callable

from common.clock import Clock
from common.timing import MIN_SAMPLES
from worker.timing import WorkerTiming

TRY_AGAIN_S = 30.0
_NOISE_S = 0.01
"""A read that takes no longer is always made: predictions of so little are noise."""


class ReadGate:
    """Decides for one worker. Event loop only."""

    def __init__(
        self,
        timing: Callable[[], WorkerTiming],
        *,
        backlog_s: Callable[[], float],
        token_bytes: float,
        clock: Clock,
    ) -> None:
        """`backlog_s` predicts how long the prompts before take."""
        self._timing = timing
        self._backlog_s = backlog_s
        self._token_bytes = token_bytes
        self._clock = clock
        self._read_s = -math.inf
        """Time of the last read, or long ago when the next one is to be made anyway."""

    def lets(self, num_tokens: int, num_cached_tokens: int) -> bool:
        """Return whether to read a prompt's tokens behind some that are in pages."""
        model, now_s = self._timing().model, self._clock.monotonic()
        if model.tier_read is not None and model.tier_read.num_samples >= MIN_SAMPLES:
            read_s = model.tier_read_s(num_tokens * self._token_bytes)
            compute_s = self._backlog_s() + model.prefill_s(num_tokens, num_cached_tokens)
            if read_s > max(_NOISE_S, compute_s) and now_s < self._read_s + TRY_AGAIN_S:
                return False
        self._read_s = now_s
        return True

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """Learn from a read that waited for nothing but its bytes."""
        model = self._timing().model
        compute_s = model.prefill_s(round(num_bytes / self._token_bytes), 0)
        if model.tier_read is not None and seconds <= compute_s < model.tier_read_s(num_bytes):
            self._read_s = -math.inf
        self._timing().observe_tier_read(num_bytes, seconds)
