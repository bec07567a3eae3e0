"""Decides how many drafted tokens a step verifies: those that make answers come faster, by the step's predicted time.

Every drafted token is one more row of the step, computed as if it decoded. A row costs time, which all answers of the
step wait for, and yields a token with the probability that it and the drafted tokens before it are right. Rows are
taken in the order of these probabilities while tokens per second rise: many for a lone answer that copies, few or none
beside many answers. A draft decides when a token comes, never which one (`engine/executor.py`), so that the choice may
depend on anything.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from common.timing import StepShape
from common.tokens import TokenArray
from engine.events import DraftCounts
from engine.executor import ScheduledSequence
from engine.plan import StepPlan
from engine.sequence import Sequence
from engine.speculation.costs import StepCosts
from engine.speculation.drafter import Draft, Drafter

MIN_GAIN = 1.08
"""Smallest ratio of tokens per second with and without drafts that is worth it: chances and times are estimates."""


class Speculator:
    """Engine thread only."""

    def __init__(self, drafter: Drafter, *, num_tokens: int) -> None:
        """`num_tokens`: most drafted tokens of one sequence in a step."""
        self._drafter = drafter
        self._num_tokens = num_tokens
        self._costs = StepCosts()
        self._num_drafted, self._num_accepted = [0] * num_tokens, [0] * num_tokens

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from the time of a step."""
        self._costs.observe(shape, seconds)

    def drafts_for(self, plan: StepPlan, *, max_tokens: int) -> Iterator[tuple[Sequence, TokenArray]]:
        """Yield sequences of a plan and the drafts to verify, none empty, of at most `max_tokens` tokens together.

        None for a step with prompts: its time is bounded by other rules (`engine/step_budget.py`).
        """
        shape = plan.shape
        if shape.num_prefill_tokens or not shape.num_decodes:
            return
        drafts = {
            sequence: self._drafter.draft(sequence, min(self._num_tokens, _num_following(sequence)))
            for sequence, item in plan.batch.items()
            if _may_draft(item)
        }
        num_drafted = min(max_tokens, sum(len(draft.chances) for draft in drafts.values()))
        times_s = self._costs.predict(shape.num_decodes, num_drafted)
        if not times_s or not num_drafted:
            return
        for sequence, num_taken in choose_rows(drafts, shape.num_decodes, times_s).items():
            draft = sequence.following(drafts[sequence].token_ids[:num_taken])
            if draft:
                yield sequence, draft

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Count a verified draft."""
        for place in range(num_drafted):
            self._num_drafted[place] += 1
            self._num_accepted[place] += place < num_accepted

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """Drafted tokens that steps have verified, by their place in the draft."""
        return tuple(map(DraftCounts, self._num_drafted, self._num_accepted))

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._drafter.forget(sequence)


def choose_rows(drafts: dict[Sequence, Draft], num_rows: int, times_s: Seq[float]) -> dict[Sequence, int]:
    """Return how many leading tokens of each draft to verify in a step of `num_rows`; without those that have none.

    `times_s` are the predicted times of the step with no, one, two, … more rows.
    """
    rows = sorted(
        ((chance, sequence) for sequence, draft in drafts.items() for chance in draft.chances),
        key=lambda row: row[0],
        reverse=True,
    )[: len(times_s) - 1]
    num_tokens = float(num_rows)
    best_rate, num_best = MIN_GAIN * num_tokens / times_s[0], 0
    for num_more, (chance, _sequence) in enumerate(rows, 1):
        num_tokens += chance
        rate = num_tokens / times_s[num_more]
        if rate > best_rate:
            best_rate, num_best = rate, num_more
    chosen: dict[Sequence, int] = {}
    for _chance, sequence in rows[:num_best]:
        chosen[sequence] = chosen.get(sequence, 0) + 1
    return chosen


def _may_draft(item: ScheduledSequence) -> bool:
    """Whether a scheduled sequence continues an answer by one token that depends on no other sequence."""
    sequence = item.sequence
    return (
        item.num_new_tokens == item.num_samples == 1
        and item.input_row is None
        and sequence.num_output_tokens > 0
        and sequence.will_decode
        and not sequence.is_beam
    )


def _num_following(sequence: Sequence) -> int:
    """Return how many drafted tokens may stand before the last token of an answer."""
    return sequence.max_num_tokens - sequence.num_tokens - 1
