"""Decides how many drafted tokens a step verifies: those that make answers come faster, by the step's predicted time.

Every drafted token is one more row of the step, computed as if it decoded. A row costs time, which all answers of the
step wait for, and yields a token with the probability that it and the drafted tokens before it are right. Rows are
taken while the geometric mean of the answers' tokens per second rises: many for a lone answer that copies, few or none
beside many answers. Their sum would do for throughput, but an answer that copies would then hold up all that do not:
nine tokens for one of eight answers, in a step that takes half as long again. So an answer's gain counts in proportion
to its own pace. A row may lengthen a draft, or begin or lengthen another one for the same place: a branch. A draft
decides when a token comes, never which one (`engine/executor.py`), so that the choice may depend on anything.
"""

import enum
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from engine.events import DraftCounts
from engine.executor import ScheduledSequence, StepResult
from engine.sequence import Sequence
from engine.speculation.costs import StepCosts
from engine.speculation.drafter import Draft, Drafter
from engine.speculation.outcomes import Expected, Outcomes
from engine.steps.plan import StepPlan

logger = logging.getLogger(__name__)

MIN_GAIN = 1.08
"""Smallest ratio of tokens per second with and without drafts that is worth it: chances and times are estimates."""
MAX_STEP_DRAFTS = 96
"""Most drafted tokens that are looked at for a step, but for one of each answer: looking costs time, too."""
ANSWERS_PER_REST = 4
"""After a step for which no draft was worth it, as many steps go by without a look as the batch has times so many
answers. Looking takes 0.3 % of the steps of a small batch, and would take 2 % of those of 32."""


class Rule(enum.Enum):
    """How a drafted token is verified."""

    COUPLED = "coupled"
    """It is accepted if it is the token that would have been drawn without it: drafts change no answer."""
    REJECTION = "rejection"
    """It is accepted with the probability that the model gives it, and else another one is drawn: answers have the
    model's distribution, and depend on the drafts."""


class Speculator:
    """Engine thread only."""

    def __init__(self, drafter: Drafter, *, num_tokens: int, rule: Rule = Rule.COUPLED) -> None:
        """`num_tokens`: most drafted tokens of one sequence in a step."""
        self._drafter = drafter
        self._rule = rule
        self._num_tokens = num_tokens
        self._costs = StepCosts()
        self._outcomes = Outcomes()
        self._num_to_rest = 0
        self._has_failed = False
        self._num_drafted, self._num_accepted = [0] * num_tokens, [0] * num_tokens

    def observe(self, plan: StepPlan, results: Seq[StepResult], seconds: float) -> None:
        """Learn from the tokens and the time of a step."""
        self._costs.observe(plan.shape, seconds - plan.drafting_s)
        for item, result in zip(plan.batch.values(), results, strict=False):
            if item.num_samples == 1 and not item.is_overtaken and not result.has_failed:
                self._drafter.observe(item, result)
        if plan.expected is not None and seconds > 0:
            num_tokens = sum(len(result.sampled) for result in results)
            self._outcomes.observe(plan.expected, num_tokens=num_tokens, seconds=seconds)

    def drafts_for(self, plan: StepPlan, *, max_tokens: int) -> Iterator[tuple[Sequence, Draft]]:
        """Yield sequences of a plan and the drafts to verify, none empty, of at most `max_tokens` tokens together.

        None for a step with prompts: its time is bounded by other rules (`engine/steps/budget.py`); and none any more
        once drafting has failed.
        """
        shape = plan.shape
        num_answers = shape.num_decodes
        if shape.num_prefill_tokens or not num_answers or self._has_failed:
            return
        if self._num_to_rest:
            self._num_to_rest -= 1
            return
        most = min(self._num_tokens, max(1, MAX_STEP_DRAFTS // num_answers))
        prospects = {
            sequence: self._drafter.prospects(sequence, min(most, _num_following(sequence)))
            for sequence, item in plan.batch.items()
            if _may_draft(item)
        }
        num_drafted = min(max_tokens, sum(len(path) for paths in prospects.values() for path in paths))
        times_s = self._costs.predict(num_answers, num_drafted) if num_drafted else []
        if not times_s:
            return
        drafting_s = self._drafter.costs_s(len(prospects), most) or (0.0,) * (most + 1)
        min_gain = MIN_GAIN * self._outcomes.optimism(num_answers)
        chosen = choose_rows(prospects, num_answers, times_s, drafting_s, min_gain=min_gain)
        if not chosen:
            self._num_to_rest = num_answers // ANSWERS_PER_REST
        paths = [pair for sequence, lens in chosen.items() for pair in zip(prospects[sequence], lens, strict=False)]
        plan.expected = Expected(
            num_answers=num_answers,
            num_tokens=num_answers + sum(sum(chances[:num_taken]) for chances, num_taken in paths),
            seconds=times_s[sum(num_taken for _, num_taken in paths)]
            + drafting_s[max((num_taken for _, num_taken in paths), default=0)],
        )
        if not chosen:
            return
        began_s = time.perf_counter()
        try:
            drafts = self._drafter.draft(chosen)
        except Exception:  # answers come without drafts
            logger.exception("drafting has failed: speculation is off until this worker starts again")
            self._has_failed = True
            return
        plan.drafting_s = time.perf_counter() - began_s
        for sequence, each in drafts.items():
            draft = Draft.of(map(sequence.following, each))
            if draft.token_ids:
                yield sequence, draft

    def rejects(self, sequence: Sequence) -> bool:
        """Return whether a sequence's drafts are verified by the rejection rule. The greedy choice leaves none."""
        request = sequence.request
        return self._rule is Rule.REJECTION and not (request.sampling.is_greedy or request.must_repeat)

    def verified(self, item: ScheduledSequence, num_accepted: int) -> None:
        """Count a verified draft."""
        for begin, token_ids in ((0, item.draft), *((branch.depth, branch.token_ids) for branch in item.branches)):
            for place in range(begin, begin + len(token_ids)):
                self._num_drafted[place] += 1
        for place in range(num_accepted):
            self._num_accepted[place] += 1

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """Drafted tokens that steps have verified, by their place in the draft."""
        return tuple(map(DraftCounts, self._num_drafted, self._num_accepted))

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._drafter.forget(sequence)


def choose_rows(
    prospects: Mapping[Sequence, Seq[Seq[float]]],
    num_rows: int,
    times_s: Seq[float],
    drafting_s: Seq[float],
    *,
    min_gain: float = MIN_GAIN,
) -> dict[Sequence, tuple[int, ...]]:
    """Return how many tokens of each draft to verify, by sequence, in a step of `num_rows`; without those with none.

    `times_s` are the predicted times of the step with no, one, two, … more rows, `drafting_s` those of drafting as many
    tokens for each. Maximizes the geometric mean, over all answers of the step, of their expected tokens per second
    (proportional fairness: Kelly, *Charging and rate control for elastic traffic*, 1997). None is worth it unless that
    rises by `min_gain`.
    """
    rows = sorted(_gains(prospects), key=lambda row: row[:3], reverse=True)[: len(times_s) - 1]
    gain, deepest = 0.0, 0
    best_gain, num_best = num_rows * math.log(min_gain), 0
    for num_more, (row_gain, depth, _path, _sequence) in enumerate(rows, 1):
        gain += row_gain
        deepest = max(deepest, -depth)
        net = gain - num_rows * math.log((times_s[num_more] + drafting_s[deepest]) / times_s[0])
        if net > best_gain:
            best_gain, num_best = net, num_more
    taken: dict[Sequence, Counter[int]] = {}
    for _gain, _depth, path, sequence in rows[:num_best]:
        taken.setdefault(sequence, Counter())[-path] += 1
    return {sequence: tuple(counts[path] for path in range(1 + max(counts))) for sequence, counts in taken.items()}


def _gains(prospects: Mapping[Sequence, Seq[Seq[float]]]) -> Iterator[tuple[float, int, int, Sequence]]:
    """Yield a row for each drafted token: by how much the logarithm of its answer's expected tokens rises; minus its
    depth; minus its path; and the sequence. An answer's likelier tokens come first, so that none gains more than those.
    """
    for sequence, paths in prospects.items():
        rows = sorted(
            ((chance, -depth, -path) for path, chances in enumerate(paths) for depth, chance in enumerate(chances, 1)),
            reverse=True,
        )
        num_tokens = 1.0
        for chance, depth, path in rows:
            yield math.log1p(chance / num_tokens), depth, path, sequence
            num_tokens += chance


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
