"""When steps end that follow each other without a change of what is in them."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps of one composition: decodes alone, or one step with other work in it."""

    start: int
    """Boundary."""
    start_s: float
    constant_s: float
    """Of a step without context."""
    per_context_token_s: float
    num_sequences: int
    num_joined: Counter[str]
    """Sequences whose first step here this is, by kind of request."""
    num_members: Mapping[str, int]
    """All, by kind."""
    num_context_tokens: int
    """In the first step."""
    is_pure: bool
    """Nothing but decodes."""

    def context_at(self, boundary: int) -> int:
        """Return the context tokens of the step behind a boundary."""
        return self.num_context_tokens + self.num_sequences * (boundary - self.start)

    def end_s(self, boundary: int) -> float:
        """Return when a boundary is reached."""
        n = boundary - self.start
        context = n * self.num_context_tokens + self.num_sequences * (n * (n - 1) // 2)
        return self.start_s + n * self.constant_s + context * self.per_context_token_s

    def step_s(self, boundary: int) -> float:
        """Return how long the step before a boundary takes."""
        return self.constant_s + self.context_at(boundary - 1) * self.per_context_token_s

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
