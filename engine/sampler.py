"""Chooses the next token of every row of a batch.

Each row goes through these steps in order; a step that its parameters do not ask for is skipped:

1. log-probabilities: float32, from the logits as the model returned them
2. grammar: tokens that structured_outputs does not allow become impossible
3. logit bias, added
4. min_tokens: tokens that would end the sample become impossible (stop tokens, and end-of-sequence unless ignore_eos)
5. penalties: repetition (prompt and output), then frequency and presence (output)
6. temperature 0, or beams: the largest logit, of equals the smallest token id. Else:
7. temperature
8. top-k: the k best tokens, of equals the smaller ids
9. top-p: the fewest best tokens whose share of the remaining mass reaches p, of equals the smaller ids
10. min-p: tokens at least min_p times as probable as the best one
11. the choice: an exponential race. Token t arrives after E(t) / probability(t), where the E(t) are independent
    exponential times, a hash of (seed, sample index, token index, t); the first to arrive is chosen

vLLM has the same order, except that min-p comes before top-k, which changes only the mass that top-p refers to.
transformers has repetition before min_tokens, with the same effect, and min-p last, as here. Both keep every token that
ties with the k-th one; here exactly k are kept.

The race (the Gumbel-max trick without the logarithms) is exact and stable: when another batch composition or device
moves the probabilities by 1e-6, only a near tie of the two best can change. Inverting the cumulative distribution is
not stable: each of its 50,000 boundaries moves, and about one draw in a thousand changes (measured on SmolLM2 in
float32). There is no random generator, so that a row's answer depends on the row alone.

A beam's row is a greedy one that reports its best tokens; `engine.beams` chooses among those of all beams.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import EngineFault
from common.sampling import SamplingParams
from engine.beams import num_candidates
from engine.cuda.columns import Column, Columns
from engine.cuda.device import Fetch, device_for
from engine.draw import Draw, DrawPlan, first_best, races, round_up_width
from engine.executor import Logprobs, Sampled, ScheduledSequence
from engine.logits import LogitEdits, LogprobsFetch, SamplingRow, fetch_logprobs, position_logprobs
from engine.penalties import Penalties, PenaltyPlan
from engine.sequence import OutputTokens

__all__ = ["Nucleus", "Sampler", "SamplingRow", "position_logprobs", "sampling_rows"]


class Nucleus(enum.Enum):
    """Method by which top-p without top-k finds its tokens, with equal answers."""

    WIDEN = "widen"
    """Rank the best tokens, and more if they do not suffice. Waits for the device: the choice for a CPU."""
    SORT = "sort"
    """Sort the vocabulary. Never waits."""


# Number of best tokens that `Nucleus.WIDEN` ranks first; how many top-p alone needs is not known beforehand.
_NUCLEUS_TOKENS = 1024


class Sampler:
    """Chooses tokens. Its state between calls only saves work: see `Penalties`. Engine thread only."""

    def __init__(self, *, vocab_size: int, eos_token_ids: frozenset[int], nucleus: Nucleus = Nucleus.WIDEN) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._nucleus = nucleus
        self._penalties = Penalties(vocab_size)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """Choose tokens and wait for them; see `choose` and `Chosen.materialize`."""
        return self.choose(logits, rows).materialize()

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> "Chosen":
        """Choose a token for each row of logits [len(rows), vocab_size], any float dtype; does not mutate them.

        Does not wait for the device, except with `Nucleus.WIDEN`.
        """
        columns = Columns()
        plan = self.plan(rows, columns)
        return plan.choose(logits, columns.upload(logits.device))

    def plan(self, rows: Sequence[SamplingRow], columns: Columns) -> "SamplingPlan":
        """Do the host's part of the choice, and add the device's inputs to `columns`."""
        return self._plan(rows, [_is_plain(row) for row in rows], columns)

    def plan_rest(self, rows: Sequence[SamplingRow], columns: Columns) -> "SamplingPlan":
        """As `plan`, where `RaceColumns` choose for the rows that race; they count as plain ones."""
        return self._plan(rows, [_is_plain(row) or races(row) for row in rows], columns)

    def _plan(self, rows: Sequence[SamplingRow], is_plain: Sequence[bool], columns: Columns) -> "SamplingPlan":
        plain: list[int] = []
        shaped: list[int] = []
        logprobs: list[tuple[int, int]] = []
        for i, row in enumerate(rows):
            (plain if is_plain[i] else shaped).append(i)
            num_top = self._num_top(row.params)
            if num_top is not None:
                logprobs.append((i, num_top))
        return SamplingPlan(
            num_rows=len(rows),
            vocab_size=self._vocab_size,
            plain_rows=columns.ints(plain) if plain and shaped else None,
            shaped_rows=columns.ints(shaped) if plain and shaped else None,
            shaped=self._plan_shaped([rows[i] for i in shaped], columns) if shaped else None,
            logprobs=tuple(logprobs),
            logprob_rows=columns.ints([i for i, _ in logprobs]) if 0 < len(logprobs) < len(rows) else None,
        )

    def _plan_shaped(self, rows: Sequence[SamplingRow], columns: Columns) -> "_ShapedPlan":
        penalized = [i for i, row in enumerate(rows) if row.params.has_penalties]
        groups: dict[_Way, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(self._way(row.params), []).append(i)
        allowed = {i: mask for i, row in enumerate(rows) if (mask := row.allowed) is not None}
        return _ShapedPlan(
            structured=tuple(allowed),
            allowed=torch.from_numpy(np.stack(list(allowed.values()))) if allowed else None,
            edits=LogitEdits.plan(rows, self._eos_token_ids, columns),
            penalties=self._penalties,
            penalty_plan=self._penalties.plan([rows[i] for i in penalized], columns) if penalized else None,
            penalized=columns.ints(penalized) if len(penalized) < len(rows) else None,
            groups=tuple(
                _Group(
                    rows=columns.ints(members) if len(groups) > 1 else None,
                    way=way,
                    draw=None if way.is_greedy else DrawPlan.of([rows[i] for i in members], self._vocab_size, columns),
                )
                for way, members in groups.items()
            ),
        )

    def _num_top(self, params: SamplingParams) -> int | None:
        """Return how many tokens are reported with their log-probabilities; None: none at all."""
        if params.has_beams:
            return num_candidates(params, self._eos_token_ids, self._vocab_size)
        return params.num_logprobs

    def _way(self, params: SamplingParams) -> "_Way":
        vocab_size = self._vocab_size
        if params.is_greedy:
            return _Way(is_greedy=True)
        if 0 < params.top_k < vocab_size:
            return _Way(width=round_up_width(params.top_k, vocab_size))
        if params.top_p == 1.0:
            return _Way()
        if self._nucleus is Nucleus.SORT:
            return _Way(width=vocab_size)
        return _Way(width=round_up_width(_NUCLEUS_TOKENS, vocab_size), may_widen=True)


def sampling_rows(item: ScheduledSequence) -> list[SamplingRow]:
    """Return the rows of a scheduled sequence, one per sampled token; valid until the sequence changes."""
    sequence, draft = item.sequence, item.draft
    request = sequence.request
    token_index = item.token_index
    output_token_ids = OutputTokens(sequence) if request.sampling.has_penalties else ()
    allowed = sequence.allowed(draft)
    places = [(sequence.sample_index + j, draft, 0, allowed) for j in range(item.num_samples)]
    places += [(sequence.sample_index, draft, i + 1, allowed) for i in range(len(draft))]
    for branch, path in zip(item.branches, item.paths, strict=True):
        allowed = sequence.allowed(path)
        places += [(sequence.sample_index, path, i + 1, allowed) for i in range(branch.depth, len(path))]
    return [
        SamplingRow(
            params=request.sampling,
            sample_index=sample_index,
            token_index=token_index + num_drafted,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=output_token_ids,
            draft=path[:num_drafted] if num_drafted else (),
            owner=sequence,
            tested=path[num_drafted] if item.rejects and num_drafted < len(path) else -1,
            allowed=None if masks is None else masks[num_drafted],
        )
        for sample_index, path, num_drafted, masks in places
    ]


def _is_plain(row: SamplingRow) -> bool:
    """Whether a row takes the best token of its logits as they are."""
    return row.params.is_greedy and row.has_plain_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Method of choosing a row's token; rows with equal ones are chosen together."""

    is_greedy: bool = False
    width: int | None = None
    """Number of best tokens to rank; None: no ranking is needed."""
    may_widen: bool = False
    """Whether more tokens may have to be ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """One batch, ready to choose from its logits. A column of row numbers is None for all rows, or for none."""

    num_rows: int
    vocab_size: int
    plain_rows: Column | None
    shaped_rows: Column | None
    shaped: "_ShapedPlan | None"
    """Plan of the rows that are not plain; None when all are."""
    logprobs: tuple[tuple[int, int], ...]
    """(row, number of best tokens) of the rows that ask for log-probabilities."""
    logprob_rows: Column | None

    def choose(self, logits: torch.Tensor, words: torch.Tensor, plain_ids: torch.Tensor | None = None) -> "Chosen":
        """Choose from logits [num_rows, vocab_size], given the uploaded columns.

        `plain_ids`, int64 [num_rows], are the tokens of plain rows; None: each takes its `first_best`.
        """
        expected = (self.num_rows, self.vocab_size)
        if logits.shape != expected:
            raise EngineFault(
                f"the model returned logits of shape {tuple(logits.shape)}; its config.json says {expected}"
            )
        if self.shaped is None:
            return self.deliver(first_best(logits) if plain_ids is None else plain_ids, logits, words)
        if self.plain_rows is None or self.shaped_rows is None:
            return self.deliver(self.shaped.choose(logits, words), logits, words)
        shaped = self.shaped_rows.of(words)
        if plain_ids is None:
            plain = self.plain_rows.of(words)
            token_ids = torch.empty(self.num_rows, dtype=torch.int64, device=logits.device)
            token_ids.index_copy_(0, plain, first_best(logits.index_select(0, plain)))
        else:
            token_ids = plain_ids.clone()  # a graph's own memory
        token_ids.index_copy_(0, shaped, self.shaped.choose(logits.index_select(0, shaped), words))
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
        """Wait for the copy. Raises EngineFault when a row's logits have no finite maximum."""
        token_ids: list[int] = self.fetch().tolist()
        if token_ids and min(token_ids) < 0:
            bad_row = next(row for row, token_id in enumerate(token_ids) if token_id < 0)
            raise EngineFault(f"logits of row {bad_row} have no finite maximum")
        sampled = [Sampled(token_id=token_id) for token_id in token_ids]
        if self.logprobs_fetch is not None:
            for (row, num_top), found in zip(self.logprobs, self.logprobs_fetch.wait(), strict=True):
                logprobs = Logprobs(token_id=found.token_id, logprob=found.logprob, top=found.top[:num_top])
                sampled[row] = Sampled(token_id=token_ids[row], logprobs=logprobs)
        return sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapedPlan:
    """Rows that are not plain: their logits are shaped, then chosen from in groups of one `_Way`."""

    structured: tuple[int, ...]
    """Rows with a grammar."""
    allowed: torch.Tensor | None
    """bool [len(structured), vocab], on the host: the tokens that their grammars allow."""
    edits: LogitEdits | None
    penalties: Penalties
    penalty_plan: PenaltyPlan | None
    penalized: Column | None
    """Rows with penalties; None: all."""
    groups: "tuple[_Group, ...]"

    def choose(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return token ids, int64 [rows], for logits [rows, vocab]."""
        shaped = self._shape(logits, words)
        if len(self.groups) == 1:
            return self.groups[0].choose(shaped, words)
        chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in self.groups:
            assert group.rows is not None, "one of several groups has all rows"
            rows = group.rows.of(words)
            chosen.index_copy_(0, rows, group.choose(shaped.index_select(0, rows), words))
        return chosen

    def _shape(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        if self.edits is None and self.penalty_plan is None and self.allowed is None:
            return logits.float()
        shaped = logits.to(torch.float32, copy=True)
        if self.allowed is not None:
            rows = torch.tensor(self.structured, device=shaped.device)
            forbidden = self.allowed.logical_not().to(shaped.device)
            shaped[rows] = shaped[rows].masked_fill_(forbidden, -torch.inf)
        if self.edits is not None:
            self.edits.apply(shaped, words)
        if self.penalty_plan is None:
            return shaped
        if self.penalized is None:
            return self.penalties.apply(self.penalty_plan, shaped, words)
        rows = self.penalized.of(words)
        return shaped.index_copy_(0, rows, self.penalties.apply(self.penalty_plan, shaped.index_select(0, rows), words))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows of one `_Way`."""

    rows: Column | None
    way: _Way
    draw: DrawPlan | None
    """None: greedy."""

    def choose(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return token ids, int64 [rows], for shaped logits [rows, vocab]."""
        if self.draw is None:
            return first_best(logits)
        return torch.cat([self._choose_part(part) for part in self.draw.on_device(logits, words).split()])

    def _choose_part(self, draw: Draw) -> torch.Tensor:
        if self.way.width is None:
            return draw.from_all()
        return draw.from_nucleus(self.way.width) if self.way.may_widen else draw.from_best(self.way.width)
