"""How far predictions of drafted steps came true: those that promise too much have to promise a larger gain.

Chances and times are estimates, each with errors of its own, and the choice prefers the rows whose errors flatter them.
So tokens per second are summed as predicted and as they came, for steps with drafts and for those without, by classes
of answers in a batch. Steps without drafts show what the machine does to every prediction; the rest is optimism. A
class that has stopped drafting forgets with the steps that pass, and tries again: some steps in hundreds.
"""

from dataclasses import dataclass, field

FORGETTING = 0.99
"""Share of the sums that is left after each step of a class."""
PRIOR_STEPS = 8.0
"""Steps whose predictions are taken to have come true before any was seen."""
MAX_OPTIMISM = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Prediction for a step."""

    num_answers: int
    num_tokens: float
    seconds: float


@dataclass(slots=True)
class _Sums:
    """Tokens per second of some steps, in proportion to those predicted."""

    num_steps: float = 0.0
    token_share: float = 0.0
    """Sum of the tokens that came, each step's in proportion to those predicted for it."""
    time_share: float = 0.0

    def forget(self) -> None:
        self.num_steps *= FORGETTING
        self.token_share *= FORGETTING
        self.time_share *= FORGETTING

    def add(self, expected: Expected, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self.token_share += num_tokens / expected.num_tokens
        self.time_share += seconds / expected.seconds

    @property
    def rate(self) -> float:
        """Tokens per second in proportion to those predicted."""
        return (PRIOR_STEPS + self.token_share) / (PRIOR_STEPS + self.time_share)


@dataclass(slots=True)
class _Class:
    drafted: _Sums = field(default_factory=_Sums)
    plain: _Sums = field(default_factory=_Sums)


class Outcomes:
    """Engine thread only; O(1) per step."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def observe(self, expected: Expected, *, num_tokens: int, seconds: float) -> None:
        """Take a step into account that brought `num_tokens` in `seconds`."""
        found = self._classes.setdefault(expected.num_answers.bit_length(), _Class())
        found.drafted.forget()
        found.plain.forget()
        is_drafted = expected.num_tokens > expected.num_answers
        (found.drafted if is_drafted else found.plain).add(expected, num_tokens, seconds)

    def optimism(self, num_answers: int) -> float:
        """Return the ratio of promised to real gains with so many answers, from 1 to `MAX_OPTIMISM`."""
        found = self._classes.get(num_answers.bit_length())
        return 1.0 if found is None else min(max(1.0, found.plain.rate / found.drafted.rate), MAX_OPTIMISM)
