"""A clock for tests."""


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        """Return the time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        assert seconds >= 0, f"time goes forward, not by {seconds}"
        self._now_s += seconds
