"""How long steps take, idle time apart."""

from collections import deque

from common.clock import Clock
from common.timing import StepShape
from engine.events import StepSample

_MAX_SAMPLES = 64  # nobody may ask for them


class StepTimer:
    """Stamps the steps of one engine. Engine thread only; O(1) a step.

    Back to back, a step lasts from the results of the one before to its own: what the host does in between counts,
    since tokens wait for that as well, and with two steps in flight it is the only span that belongs to one step alone.
    After a pause it lasts from the moment at which it was planned.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._samples: deque[StepSample] = deque(maxlen=_MAX_SAMPLES)

    def begin(self) -> None:
        """A step is about to be planned."""
        if self._since_s is None:
            self._since_s = self._clock.monotonic()

    def end(self, shape: StepShape) -> None:
        """The results of the oldest step are there."""
        now_s = self._clock.monotonic()
        if self._since_s is not None:
            self._samples.append(StepSample(shape=shape, seconds=now_s - self._since_s))
        self._since_s = now_s

    def pause(self) -> None:
        """Nothing is left to do, or what was done failed: the time until the next `begin` belongs to no step."""
        self._since_s = None

    def drain(self) -> tuple[StepSample, ...]:
        """Return the steps that ended since the last call."""
        if not self._samples:
            return ()
        samples = tuple(self._samples)
        self._samples.clear()
        return samples
