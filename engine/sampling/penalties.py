"""Repetition, frequency and presence penalties, and the token counts behind them.

Counts stay on the device between steps. A step sends only the tokens that were chosen since the last one, so that its
cost on the host does not grow with the context. One that the host does not know yet is counted where it was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.device.columns import Column, PackedColumns, RowMap
from engine.sampling.logits import SamplingRow

Cells = npt.NDArray[np.int64]

_MIN_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """Content of a row of the counts: a sequence's prompt and its first outputs."""

    key: object
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyPlan:
    """One step's penalties; unless noted, a column has an entry per row of the step."""

    places: Column
    """Places of the rows in the counts, int64."""
    restarted: Column | None
    """Places that get a new owner, int64."""
    prompt_cells: Column | None
    """Prompt tokens of the restarted places, int64: place * vocab_size + token id."""
    output_cells: Column | None
    """Outputs not yet counted, int64, likewise."""
    pending_cells: Column | None
    """First cells of the places whose latest output the host does not know, int64: place * vocab_size."""
    pending_rows: Column | None
    """Rows of these outputs among the tokens sampled last, int64."""
    draft_cells: Column | None
    """Drafted tokens, which count for their row only, int64: row * vocab_size + token id."""
    repetition: Column | None
    """None, as for the next two: no row has such a penalty."""
    frequency: Column | None
    presence: Column | None
    counted: dict[int, _Counted]
    """Content of each place after the step."""


class Penalties:
    """Token counts of the penalised sequences, and the penalties. Engine thread only."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: RowMap[object] = RowMap(0)
        self._counted: dict[int, _Counted] = {}
        self._output_counts: torch.Tensor | None = None
        """float32 [places, vocab_size], exact below 2**24."""
        self._in_prompt: torch.Tensor | None = None
        """bool [places, vocab_size]."""

    def plan(self, rows: Sequence[SamplingRow], columns: PackedColumns) -> PenaltyPlan:
        """Add the columns that `apply` needs. Changes no counts: a step may fail before `apply`."""
        keys = [object() if row.owner is None else row.owner for row in rows]
        if len(keys) > self._places.num_rows:
            self._places.grow(max(_MIN_ROWS, 1 << (len(keys) - 1).bit_length()))
            self._counted.clear()  # `_tables` makes new tables: rare, and everything is counted anew
        places = self._places.assign(keys)
        counted: dict[int, _Counted] = {}
        restarted: list[int] = []
        prompt_cells: list[Cells] = []
        output_cells: list[Cells] = []
        pending: dict[int, int] = {}
        draft_cells = [self._cells(i, row.draft) for i, row in enumerate(rows) if row.draft]
        for place, key, row in zip(places, keys, rows, strict=True):
            if place in counted:
                continue  # a sequence with several rows
            known = self._counted.get(place)
            num_counted = 0
            if known is not None and known.key is key:
                num_counted = known.num_outputs
            else:
                restarted.append(place)
                prompt_cells.append(self._cells(place, row.prompt_token_ids))
            num_outputs = len(row.output_token_ids)
            if num_outputs > num_counted:
                output_cells.append(self._cells(place, row.output_token_ids[num_counted:]))
            if row.pending_row is not None:
                pending[place] = row.pending_row
                num_outputs += 1
            counted[place] = _Counted(key=key, num_outputs=num_outputs)
        params = [row.params for row in rows]
        repetition = [p.repetition_penalty for p in params]
        frequency, presence = [p.frequency_penalty for p in params], [p.presence_penalty for p in params]
        return PenaltyPlan(
            places=columns.ints(places),
            restarted=columns.ints(restarted) if restarted else None,
            prompt_cells=columns.ints(np.concatenate(prompt_cells)) if prompt_cells else None,
            output_cells=columns.ints(np.concatenate(output_cells)) if output_cells else None,
            pending_cells=columns.ints([place * self._vocab_size for place in pending]) if pending else None,
            pending_rows=columns.ints([*pending.values()]) if pending else None,
            draft_cells=columns.ints(np.concatenate(draft_cells)) if draft_cells else None,
            repetition=columns.floats(repetition) if any(p != 1.0 for p in repetition) else None,
            frequency=columns.floats(frequency) if any(frequency) else None,
            presence=columns.floats(presence) if any(presence) else None,
            counted=counted,
        )

    def apply(
        self, plan: PenaltyPlan, logits: torch.Tensor, words: torch.Tensor, last_sampled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Count new tokens; apply repetition, frequency and presence to logits [rows, vocab] (float32), in place.

        `last_sampled`: see `SamplingPlan.choose`; only rows with a `pending_row` need it, and none is negative.
        Temporaries are few: each is as large as the logits, and new memory costs a CPU more than the arithmetic.
        """
        counts, in_prompt = self._tables(logits.device)
        self._count(plan, counts, in_prompt, words)
        if plan.pending_cells is not None and plan.pending_rows is not None:
            assert last_sampled is not None, "a pending token lies among those sampled last"
            cells = plan.pending_cells.of(words) + last_sampled.index_select(0, plan.pending_rows.of(words))
            _add_at(counts, cells)
        self._counted.update(plan.counted)
        places = plan.places.of(words)
        output_counts = counts.index_select(0, places)
        _add_cells(output_counts, plan.draft_cells, words)
        in_output = output_counts > 0
        if plan.repetition is not None:
            is_new = ~(in_output | in_prompt.index_select(0, places))
            penalty, one = _factors(plan.repetition, words), torch.ones((), device=logits.device)
            logits.div_(torch.where(is_new | (logits <= 0), one, penalty))
            logits.mul_(torch.where(is_new | (logits > 0), one, penalty))
        if plan.frequency is not None:
            logits.sub_(output_counts.mul_(_factors(plan.frequency, words)))
        if plan.presence is not None:
            logits.sub_(torch.mul(in_output, _factors(plan.presence, words), out=output_counts))
        return logits

    def _count(self, plan: PenaltyPlan, counts: torch.Tensor, in_prompt: torch.Tensor, words: torch.Tensor) -> None:
        for place in plan.counted:
            self._counted.pop(place, None)  # if a launch below fails, these must be counted anew
        if plan.restarted is not None:
            restarted = plan.restarted.of(words)
            counts.index_fill_(0, restarted, 0.0)
            in_prompt.index_fill_(0, restarted, 0)
        if plan.prompt_cells is not None:
            in_prompt.view(-1).index_fill_(0, plan.prompt_cells.of(words), 1)
        _add_cells(counts, plan.output_cells, words)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two tables, with a row per place."""
        sizes = (self._places.num_rows, self._vocab_size)
        if self._output_counts is None or self._in_prompt is None or self._output_counts.shape != sizes:
            self._output_counts = torch.zeros(sizes, dtype=torch.float32, device=device)
            self._in_prompt = torch.zeros(sizes, dtype=torch.bool, device=device)
        return self._output_counts, self._in_prompt

    def _cells(self, place: int, token_ids: Sequence[int]) -> Cells:
        return np.asarray(token_ids, dtype=np.int64) + place * self._vocab_size


def _add_cells(counts: torch.Tensor, planned: Column | None, words: torch.Tensor) -> None:
    """Add 1 to cells of counts [rows, vocab], numbered row by row. Mutates them."""
    if planned is not None:
        _add_at(counts, planned.of(words))


def _add_at(counts: torch.Tensor, cells: torch.Tensor) -> None:
    counts.view(-1).scatter_add_(0, cells, torch.ones((), device=counts.device).expand(len(cells)))


def _factors(column: Column, words: torch.Tensor) -> torch.Tensor:
    return column.of(words).float().unsqueeze(1)
