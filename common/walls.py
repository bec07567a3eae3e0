"""Shares of a worker's time in a window, or of a pool's: what bounds it. From the totals of its steps."""

from collections.abc import Callable
from dataclasses import dataclass

_PARTS = ("memory", "compute", "link", "overhead", "waiting")

Total = Callable[[str], float]
"""Returns a field of the totals of steps (`worker.recent_steps.StepSums`), in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WallShares:
    """Use of the time in a window, in shares of the time that the workers have lived in it; all 0 without any."""

    busy: float = 0.0
    memory: float = 0.0
    """Least time for the memory traffic of the steps; 0 where the device was not measured, like `compute`."""
    compute: float = 0.0
    link: float = 0.0
    overhead: float = 0.0
    """Time of steps beyond the bounds of memory and arithmetic, and between steps with work."""
    waiting: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name. They may add up to more than 1: memory, arithmetic and links work at the same time."""
        return {name: float(getattr(self, name)) for name in _PARTS}

    @property
    def binds(self) -> str:
        """The name of the largest part, or "steps" where busy time cannot be divided; empty without steps on record."""
        if not self.busy and not any(self.parts.values()):
            return ""
        if not self.memory and not self.compute and self.busy > max(self.waiting, self.overhead, self.link):
            return "steps"
        return max(_PARTS, key=lambda name: float(getattr(self, name)))


def overhead_s(total: Total) -> float:
    """Return the time of steps beyond their bounds: prefill and decode steps each have their own."""
    return sum(
        max(0.0, total(f"{kind}_s") - max(total(f"{kind}_memory_s"), total(f"{kind}_compute_s")))
        for kind in ("prefill", "decode")
    )


def wall_shares(total: Total, covered_s: float) -> WallShares:
    """Return the shares of `covered_s`, the seconds that the totals cover, summed over the workers."""
    if not covered_s:
        return WallShares()
    steps_s = total("prefill_s") + total("decode_s")
    busy, host = min(1.0, steps_s / covered_s), total("host_s") / covered_s

    def part(seconds: float) -> float:
        return busy * seconds / steps_s if steps_s else 0.0

    memory = part(total("prefill_memory_s") + total("decode_memory_s"))
    compute = part(total("prefill_compute_s") + total("decode_compute_s"))
    return WallShares(
        busy=busy,
        memory=memory,
        compute=compute,
        link=total("link_s") / covered_s,
        overhead=(part(overhead_s(total)) if memory or compute else 0.0) + host,
        waiting=max(0.0, 1 - busy - host),
    )
