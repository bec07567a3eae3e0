"""Plans of choices, and what the device does with them: shapes logits, chooses tokens, copies them to the host.

`engine.sampling.sampler` makes the plans, and documents the order of the steps.
"""

from dataclasses import dataclass

import torch

from common.errors import EngineFault
from engine.device.columns import Column
from engine.device.devices import Fetch, device_for
from engine.executor import Logprobs, Sampled
from engine.sampling.draw import Draw, DrawKernel, DrawPlan, first_best
from engine.sampling.logits import LogitEdits, LogprobsFetch, TokenMasks, fetch_logprobs
from engine.sampling.penalties import Penalties, PenaltyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMethod:
    """Method of choosing a row's token; rows with equal ones are chosen together."""

    is_greedy: bool = False
    width: int | None = None
    """Number of best tokens to rank; None: no ranking is needed."""
    may_widen: bool = False
    """Whether more tokens may have to be ranked."""
    kernel: DrawKernel | None = None
    """Kernel that draws, whatever the parameters; None: torch does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedGroup:
    """Rows of one `ChoiceMethod`."""

    rows: Column | None
    method: ChoiceMethod
    draw: DrawPlan | None
    """None: greedy."""

    def choose(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return token ids, int64 [rows], for shaped logits [rows, vocab]."""
        if self.draw is None:
            return first_best(logits)
        draw = self.draw.on_device(logits, words)
        if self.method.kernel is not None:
            return self.method.kernel(draw)
        return torch.cat([self._choose_part(part) for part in draw.split()])

    def _choose_part(self, draw: Draw) -> torch.Tensor:
        if self.method.width is None:
            return draw.from_all()
        return draw.from_nucleus(self.method.width) if self.method.may_widen else draw.from_best(self.method.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedPlan:
    """Rows that are not plain: their logits are shaped, then chosen from in groups of one `ChoiceMethod`."""

    masks: TokenMasks | None
    edits: LogitEdits | None
    penalties: Penalties
    penalty_plan: PenaltyPlan | None
    penalized: Column | None
    """Rows with penalties; None: all."""
    groups: tuple[ShapedGroup, ...]

    def choose(
        self, logits: torch.Tensor, words: torch.Tensor, last_sampled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return token ids, int64 [rows], for logits [rows, vocab]."""
        shaped = self._shape(logits, words, last_sampled)
        if len(self.groups) == 1:
            return self.groups[0].choose(shaped, words)
        chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in self.groups:
            assert group.rows is not None, "one of several groups has all rows"
            rows = group.rows.of(words)
            chosen.index_copy_(0, rows, group.choose(shaped.index_select(0, rows), words))
        return chosen

    def _shape(self, logits: torch.Tensor, words: torch.Tensor, last_sampled: torch.Tensor | None) -> torch.Tensor:
        if self.edits is None and self.penalty_plan is None and self.masks is None:
            return logits.float()
        shaped = logits.to(torch.float32, copy=True)
        if self.masks is not None:
            self.masks.apply(shaped, words)
        if self.edits is not None:
            self.edits.apply(shaped, words)
        if self.penalty_plan is None:
            return shaped
        if self.penalized is None:
            return self.penalties.apply(self.penalty_plan, shaped, words, last_sampled)
        rows = self.penalized.of(words)
        penalized = self.penalties.apply(self.penalty_plan, shaped.index_select(0, rows), words, last_sampled)
        return shaped.index_copy_(0, rows, penalized)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """One batch, ready to choose from its logits. A column of row numbers is None for all rows, or for none."""

    num_rows: int
    vocab_size: int
    plain_rows: Column | None
    shaped_rows: Column | None
    shaped: ShapedPlan | None
    """Plan of the rows that are not plain; None when all are."""
    logprobs: tuple[tuple[int, int], ...]
    """(row, number of best tokens) of the rows that ask for log-probabilities."""
    logprob_rows: Column | None

    def choose(
        self,
        logits: torch.Tensor,
        words: torch.Tensor,
        plain_ids: torch.Tensor | None = None,
        last_sampled: torch.Tensor | None = None,
    ) -> "Chosen":
        """Choose from logits [num_rows, vocab_size], given the uploaded columns.

        `plain_ids`, int64 [num_rows], are the tokens of plain rows; None: each takes its `first_best`. `last_sampled`,
        int64, are those that the step before has sampled, to which `SamplingRow.pending_row` points.
        """
        expected = (self.num_rows, self.vocab_size)
        if logits.shape != expected:
            raise EngineFault(
                f"the model returned logits of shape {tuple(logits.shape)}; its config.json says {expected}"
            )
        if self.shaped is None:
            return self.deliver(first_best(logits) if plain_ids is None else plain_ids, logits, words)
        if self.plain_rows is None or self.shaped_rows is None:
            return self.deliver(self.shaped.choose(logits, words, last_sampled), logits, words)
        shaped = self.shaped_rows.of(words)
        if plain_ids is None:
            plain = self.plain_rows.of(words)
            token_ids = torch.empty(self.num_rows, dtype=torch.int64, device=logits.device)
            token_ids.index_copy_(0, plain, first_best(logits.index_select(0, plain)))
        else:
            token_ids = plain_ids.clone()  # a graph's own memory
        token_ids.index_copy_(0, shaped, self.shaped.choose(logits.index_select(0, shaped), words, last_sampled))
        return self.deliver(token_ids, logits, words)

    def deliver(self, token_ids: torch.Tensor, logits: torch.Tensor, words: torch.Tensor) -> "Chosen":
        """Start copying the choice (int64 [num_rows]) and the requested log-probabilities to the host."""
        logprobs = None
        if self.logprobs:
            known = token_ids.clamp(min=0)
            if self.logprob_rows is not None:
                rows = self.logprob_rows.of(words)
                logits, known = logits.index_select(0, rows), known.index_select(0, rows)
            logprobs = fetch_logprobs(logits, known, max(num_top for _, num_top in self.logprobs))
        # Last, so that nothing of the step runs any more when the tokens arrive.
        fetch = device_for(token_ids.device).fetch(token_ids)
        return Chosen(token_ids=token_ids, fetch=fetch, logprobs_fetch=logprobs, logprobs=self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One token per row, on the device, and its copy to the host that is in progress."""

    token_ids: torch.Tensor
    """int64 [rows]; negative where a row's logits have no finite maximum."""
    fetch: Fetch
    logprobs_fetch: LogprobsFetch | None
    logprobs: tuple[tuple[int, int], ...]
    """(row, number of best tokens) of the rows in `logprobs_fetch`."""

    def materialize(self) -> list[Sampled]:
        """Wait for the copy."""
        token_ids: list[int] = self.fetch().tolist()
        sampled = [Sampled(token_id=token_id) for token_id in token_ids]
        if self.logprobs_fetch is not None:
            for (row, num_top), found in zip(self.logprobs, self.logprobs_fetch.wait(), strict=True):
                logprobs = Logprobs(token_id=found.token_id, logprob=found.logprob, top=found.top[:num_top])
                sampled[row] = Sampled(token_id=token_ids[row], logprobs=logprobs)
        return sampled
