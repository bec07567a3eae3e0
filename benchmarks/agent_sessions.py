"""The recorded sessions of a coding agent that measurements with real clusters play, smaller and faster."""

from dataclasses import dataclass
from pathlib import Path

from measure.workload.spec import RecordedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """By how much recorded sessions are made smaller and faster, and their largest sizes after that."""

    shrink: int
    """Divides lengths."""
    speed: float
    """Divides pauses."""
    max_pause_s: float
    max_prompt: int
    """Tokens of the longest prompt with its answer, as played."""

    def first_sessions(self, path: Path, *, num_sessions: int, num_turns: int) -> RecordedSpec:
        """Return the first turns of the first sessions of a file that are short enough."""
        return RecordedSpec(
            path=path,
            shrink=self.shrink,
            speed=self.speed,
            max_pause_s=self.max_pause_s,
            limit=num_sessions,
            longest=self.max_prompt * self.shrink,
            turns=num_turns,
        )
