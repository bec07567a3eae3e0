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

On a CPU with a compiler, one kernel (`engine/ops/cpu/draw.h`) does steps 7 to 11 for rows of any parameters together,
except for rows that test a drafted token. On a GPU with Triton, `cut` and `race` do them: inside a decode step's graph
for rows whose logits nothing shapes, behind it for the others. Torch does them everywhere else, and is the reference.

A beam's row is a greedy one that reports its best tokens; `engine.beams` chooses among those of all beams.
"""

from collections.abc import Sequence

import torch

from common.errors import EngineFault
from common.sampling import SamplingParams
from engine.beams import num_candidates
from engine.device.columns import PackedColumns
from engine.executor import Sampled, ScheduledSequence
from engine.sampling.device_draw import races
from engine.sampling.draw import DrawKernel, DrawPlan, round_up_width
from engine.sampling.logits import LogitEdits, SamplingRow, TokenMasks
from engine.sampling.penalties import Penalties
from engine.sampling.plan import ChoiceMethod, Chosen, SamplingPlan, ShapedGroup, ShapedPlan
from engine.sequence import OutputTokens

# Number of best tokens that top-p alone ranks first; how many it needs is not known beforehand.
_NUCLEUS_TOKENS = 1024


class Sampler:
    """Chooses tokens. Its state between calls only saves work: see `Penalties`. Engine thread only."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        draw_kernel: DrawKernel | None = None,
    ) -> None:
        """`draw_kernel`: draws for all rows that test no drafted token; None: torch does."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._draw_kernel = draw_kernel
        self._penalties = Penalties(vocab_size)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """Choose tokens and wait for them; see `choose`. Raises EngineFault for logits without a finite maximum."""
        sampled = self.choose(logits, rows).materialize()
        bad_row = next((row for row, each in enumerate(sampled) if each.token_id < 0), None)
        if bad_row is not None:
            raise EngineFault(f"logits of row {bad_row} have no finite maximum")
        return sampled

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Chosen:
        """Choose a token for each row of logits [len(rows), vocab_size], any float dtype; does not mutate them.

        Waits for the device for top-p that no kernel draws, to rank more tokens where the best ones do not suffice.
        """
        columns = PackedColumns()
        plan = self.plan(rows, columns)
        return plan.choose(logits, columns.upload(logits.device))

    def plan(self, rows: Sequence[SamplingRow], columns: PackedColumns) -> SamplingPlan:
        """Do the host's part of the choice, and add the device's inputs to `columns`."""
        return self._plan(rows, [_is_plain(row) for row in rows], columns)

    def plan_rest(self, rows: Sequence[SamplingRow], columns: PackedColumns) -> SamplingPlan:
        """As `plan`, where `RaceColumns` choose for the rows that race; they count as plain ones."""
        return self._plan(rows, [_is_plain(row) or races(row) for row in rows], columns)

    def _plan(self, rows: Sequence[SamplingRow], is_plain: Sequence[bool], columns: PackedColumns) -> SamplingPlan:
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

    def _plan_shaped(self, rows: Sequence[SamplingRow], columns: PackedColumns) -> ShapedPlan:
        penalized = [i for i, row in enumerate(rows) if row.params.has_penalties]
        groups: dict[ChoiceMethod, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(self._method(row), []).append(i)
        return ShapedPlan(
            masks=TokenMasks.plan(rows, columns),
            edits=LogitEdits.plan(rows, self._eos_token_ids, columns),
            penalties=self._penalties,
            penalty_plan=self._penalties.plan([rows[i] for i in penalized], columns) if penalized else None,
            penalized=columns.ints(penalized) if len(penalized) < len(rows) else None,
            groups=tuple(
                ShapedGroup(
                    rows=columns.ints(members) if len(groups) > 1 else None,
                    method=method,
                    draw=None
                    if method.is_greedy
                    else DrawPlan.of([rows[i] for i in members], self._vocab_size, columns),
                )
                for method, members in groups.items()
            ),
        )

    def _num_top(self, params: SamplingParams) -> int | None:
        """Return how many tokens are reported with their log-probabilities; None: none at all."""
        if params.has_beams:
            return num_candidates(params, self._eos_token_ids, self._vocab_size)
        return params.num_logprobs

    def _method(self, row: SamplingRow) -> ChoiceMethod:
        params, vocab_size = row.params, self._vocab_size
        if params.is_greedy:
            return ChoiceMethod(is_greedy=True)
        if self._draw_kernel is not None and row.tested < 0:
            return ChoiceMethod(kernel=self._draw_kernel)
        if 0 < params.top_k < vocab_size:
            return ChoiceMethod(width=round_up_width(params.top_k, vocab_size))
        if params.top_p == 1.0:
            return ChoiceMethod()
        return ChoiceMethod(width=round_up_width(_NUCLEUS_TOKENS, vocab_size), may_widen=True)


def sampling_rows(item: ScheduledSequence) -> list[SamplingRow]:
    """Return the rows of a scheduled sequence, one per sampled token; valid until the sequence changes.

    They have no `allowed` while its tokens are not known: see `ScheduledSequence.chooses_late`.
    """
    sequence, draft = item.sequence, item.draft
    request = sequence.request
    token_index = item.token_index
    output_token_ids = OutputTokens(sequence) if request.sampling.has_penalties else ()
    allowed = item.allowed(draft)
    places = [(sequence.sample_index + j, draft, 0, allowed) for j in range(item.num_samples)]
    places += [(sequence.sample_index, draft, i + 1, allowed) for i in range(len(draft))]
    for branch, path in zip(item.branches, item.paths, strict=True):
        allowed = item.allowed(path)
        places += [(sequence.sample_index, path, i + 1, allowed) for i in range(branch.depth, len(path))]
    return [
        SamplingRow(
            params=request.sampling,
            sample_index=sample_index,
            token_index=token_index + num_drafted,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=output_token_ids,
            pending_row=None if item.is_input_known else item.input_row,
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
