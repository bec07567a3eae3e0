"""The plan of one step."""

import math
from dataclasses import dataclass, field

from common.ids import BlockId
from common.timing import StepShape
from engine.executor import Branch, ScheduledSequence
from engine.sequence import Sequence
from engine.speculation.drafter import Draft
from engine.speculation.outcomes import Expected
from engine.steps.backlog import num_pairs


@dataclass(slots=True)
class StepPlan:
    """One step: pages to copy first (copy-on-write), then the batch to compute."""

    batch: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    max_tokens: int = 0
    """Tokens that the step may hold."""
    num_tokens: int = 0
    num_decodes: int = 0
    num_context_tokens: int = 0
    num_prefill_pairs: int = 0
    undrafted: StepShape | None = None
    """Counts of the step without its drafts; None: it has none."""
    expected: Expected | None = None
    """The speculator's prediction for the step."""
    drafting_s: float = 0.0
    """Time that its drafts have taken."""
    max_s: float = math.inf
    """Time that the step may take with prompts, because of the answers that decode in it."""
    is_short: bool = False
    """Whether a running sequence needs pages that only preemption, or the end of the steps in flight, can free."""

    @property
    def shape(self) -> StepShape:
        """Counts that the step's time depends on."""
        return StepShape(
            num_prefill_tokens=self.num_tokens - self.num_decodes,
            num_prefill_pairs=self.num_prefill_pairs,
            num_decodes=self.num_decodes,
            num_context_tokens=self.num_context_tokens,
        )

    def add(self, sequence: Sequence, num_new: int, num_to_run: int) -> None:
        """Compute the next `num_new` of the `num_to_run` tokens that a sequence has to run."""
        self.batch[sequence] = ScheduledSequence(
            sequence,
            num_new,
            num_samples=sequence.num_rows if num_new == num_to_run else 0,
            input_row=sequence.pending_row if sequence.num_pending else None,
        )
        self.num_tokens += num_new
        num_before = sequence.num_computed
        if num_to_run == 1:  # the end of a prompt, too: it is computed as if it decoded
            self.num_decodes += 1
            self.num_context_tokens += num_before + 1
        else:
            self.num_prefill_pairs += num_pairs(num_new, num_before)

    def add_draft(self, sequence: Sequence, draft: Draft, *, rejects: bool) -> None:
        """Let a sequence's last known token be followed by drafted ones, each computed as if it decoded.

        Branches have their pages. `rejects`: the tokens are verified by the rejection rule.
        """
        self.undrafted = self.undrafted or self.shape
        item = self.batch[sequence]
        item.draft, item.branches, item.rejects = draft.token_ids, draft.branches, rejects
        item.num_new_tokens += len(draft.token_ids)
        self.num_tokens += item.num_drafted
        self.num_decodes += item.num_drafted
        num_known = sequence.num_computed + 1
        self.num_context_tokens += num_pairs(len(draft.token_ids), num_known)
        for branch in draft.branches:
            self.num_context_tokens += num_pairs(len(branch.token_ids), num_known + branch.depth)

    @property
    def branches(self) -> list[Branch]:
        """Branches of all drafts."""
        return [branch for item in self.batch.values() for branch in item.branches]
