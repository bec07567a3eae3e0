"""Ends of consecutive steps whose composition does not change."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSegment:
    """Consecutive steps of one composition: decodes alone, or one step with other work in it."""

    start: int
    """Boundary before the first step."""
    start_s: float
    constant_s: float
    """Time of a step without context."""
    per_context_token_s: float
    num_sequences: int
    num_context_tokens: int
    """Context tokens of the first step."""
    is_pure: bool
    """Whether the steps hold nothing but decodes."""

    def context_at(self, boundary: int) -> int:
        """Return the context tokens of the step after a boundary."""
        return self.num_context_tokens + self.num_sequences * (boundary - self.start)

    def end_s(self, boundary: int) -> float:
        """Return the time of a boundary."""
        n = boundary - self.start
        context = n * self.num_context_tokens + self.num_sequences * (n * (n - 1) // 2)
        return self.start_s + n * self.constant_s + context * self.per_context_token_s

    def first_boundary_at(self, time_s: float) -> int:
        """Return the first boundary at or after a time."""
        square = self.per_context_token_s * self.num_sequences / 2
        linear = self.constant_s + self.per_context_token_s * self.num_context_tokens - square
        left_s = time_s - self.start_s
        root = math.sqrt(linear * linear + 4 * square * left_s)
        boundary = self.start + max(1, int(2 * left_s / (linear + root)))
        while self.end_s(boundary) < time_s:
            boundary += 1
        while boundary > self.start + 1 and self.end_s(boundary - 1) >= time_s:
            boundary -= 1
        return boundary
