"""Whether the disk is worth asking: faults in a row turn its tier off, and after a while it is tried again."""

import logging

from common.clock import Clock
from kv_tiers.faults import FaultKind, TierFault, reason_of

logger = logging.getLogger(__name__)

MAX_FAULTS_IN_A_ROW = 8
RETRY_S = 30.0
SLOW_S = 1.0
"""Seconds of one read or write that count as a fault: computing a block takes less."""


class Health:
    """The alarm of the disk tier, and when to try what failed once more. Under the lock of `Tiers`."""

    def __init__(self, clock: Clock) -> None:
        self.alarm: str | None = None
        self._clock = clock
        self._num_in_a_row = 0
        self._retry_at_s = 0.0

    def note(self, fault: TierFault | None) -> bool:
        """Count how a read or write ended; returns whether the tier is to be turned off."""
        if fault is None:
            self._num_in_a_row = 0
        elif fault.kind is FaultKind.FLIPPED:
            pass  # costs its block alone: what lies beside it may be whole
        elif fault.kind is FaultKind.FULL:
            self._raise(f"the disk tier takes no more blocks: {fault}; free space, or lower tiers.disk_gib")
        else:
            self._num_in_a_row += 1
            return fault.kind is FaultKind.VANISHED or self._num_in_a_row >= MAX_FAULTS_IN_A_ROW
        return False

    def turn_off(self, reason: Exception) -> None:
        """Note that there is no tier now, and why."""
        self._num_in_a_row = 0
        key = "tiers.path: " if isinstance(reason, OSError) else ""
        self._raise(f"the disk tier is off: {key}{reason_of(reason)}; it is tried again every {RETRY_S:.0f} s")

    def begin_retry(self) -> bool:
        """Return whether it is time to try again: True for one caller in each period."""
        if self.alarm is None or self._clock.monotonic() < self._retry_at_s:
            return False
        self._retry_at_s = self._clock.monotonic() + RETRY_S
        return True

    def clear(self) -> None:
        """End the alarm."""
        if self.alarm is not None:
            logger.info("the disk tier is tried again")
        self.alarm = None

    def _raise(self, text: str) -> None:
        if text != self.alarm:
            logger.warning("%s", text)
        self.alarm = text
        self._retry_at_s = self._clock.monotonic() + RETRY_S
