"""Operations of the sampler on logits: shaping them in place, ranking them, and log-probabilities.

All of them work on whole batches, on the logits' device, and never wait for it. Their inputs from the host are planned
first, as columns that go to the device in one copy.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.sampling import SamplingParams
from engine.device.columns import Column, PackedColumns
from engine.device.devices import Fetch, device_for
from engine.executor import Logprobs
from engine.text.grammar import Allowed


# Not frozen: one is made for every token, and the guard of a frozen class costs more than the rest of its construction.
@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """Inputs of the choice of one token, apart from its logits. Must not be changed."""

    params: SamplingParams
    sample_index: int
    token_index: int
    """Position in the sample's output: the number of tokens generated before, drafted ones included."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    draft: Sequence[int] = ()
    """Drafted tokens between the outputs and this one."""
    pending_row: int | None = None
    """Row of the latest output among the tokens sampled last, when the host does not know it yet; `output_token_ids`
    are those before it."""
    tested: int = -1
    """Drafted token at its place, which the rejection rule accepts or not; -1: none, or the coupled rule."""
    owner: object | None = None
    """Sequence that the tokens belong to: penalties then count a token once, in the step after it was chosen, not in
    every step. Its rows have one prompt, and outputs that grow at the end. None: tokens are counted anew."""
    allowed: Allowed | None = None
    """Tokens that the grammar of the answer allows; None without a grammar."""

    @property
    def must_continue(self) -> bool:
        """Whether the sample is still shorter than `min_tokens`."""
        return self.token_index < self.params.min_tokens

    @property
    def has_plain_logits(self) -> bool:
        """Whether the token is chosen from the logits as the model returns them."""
        params = self.params
        is_edited = params.logit_bias or params.has_penalties or params.structured_outputs
        return not is_edited and not self.must_continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells of a matrix of logits."""

    rows: Column
    token_ids: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Planned logit bias and min_tokens of a batch."""

    biased: Cells | None
    biases: Column | None
    forbidden: Cells | None

    @classmethod
    def plan(
        cls, rows: Sequence[SamplingRow], eos_token_ids: Collection[int], columns: PackedColumns
    ) -> "LogitEdits | None":
        """Add the columns that `apply` needs. Returns None when there is nothing to edit."""
        # The samples of a request share its parameters, which are packed only once.
        biases = {id(row.params): row.params for row in rows if row.params.logit_bias}
        ends = {id(row.params): row.params for row in rows if row.must_continue}
        if not biases and not ends:
            return None
        bias_of = {key: np.array(params.logit_bias, dtype=np.float64) for key, params in biases.items()}
        ends_of = {key: np.array([*params.end_token_ids(eos_token_ids)]) for key, params in ends.items()}
        biased = [i for i, row in enumerate(rows) if row.params.logit_bias]
        going_on = [i for i, row in enumerate(rows) if row.must_continue]
        values = [bias_of[id(rows[i].params)] for i in biased]
        return cls(
            biased=_plan_cells(biased, [value[:, 0] for value in values], columns),
            biases=columns.floats(np.concatenate([value[:, 1] for value in values])) if values else None,
            forbidden=_plan_cells(going_on, [ends_of[id(rows[i].params)] for i in going_on], columns),
        )

    def apply(self, logits: torch.Tensor, words: torch.Tensor) -> None:
        """Add the biases to logits [rows, vocab] (float32), then forbid tokens. Mutates them."""
        if self.biased is not None and self.biases is not None:
            cells = (self.biased.rows.of(words), self.biased.token_ids.of(words))
            logits.index_put_(cells, self.biases.of(words).float(), accumulate=True)
        if self.forbidden is not None:
            cells = (self.forbidden.rows.of(words), self.forbidden.token_ids.of(words))
            logits.index_put_(cells, torch.full((), -torch.inf, device=logits.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Planned masks of a batch: the tokens that grammars allow."""

    rows: Column | None
    """Rows with a grammar, int64; None: all rows."""
    bits: Column
    """int32 [num_masks, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 is set where token t is allowed."""

    @classmethod
    def plan(cls, rows: Sequence[SamplingRow], columns: PackedColumns) -> "TokenMasks | None":
        """Add the columns that `apply` needs. Returns None when no row has a grammar."""
        masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
        if not masks:
            return None
        vocab_size = len(next(iter(masks.values())))
        bits = np.zeros((len(masks), -(-vocab_size // 32) * 4), dtype=np.uint8)
        for packed, mask in zip(bits, masks.values(), strict=True):
            packed[: -(-vocab_size // 8)] = np.packbits(mask, bitorder="little")
        return cls(
            rows=columns.ints(list(masks)) if len(masks) < len(rows) else None,
            bits=columns.add(bits.view(np.dtype("<i4"))),
        )

    def apply(self, logits: torch.Tensor, words: torch.Tensor) -> None:
        """Forbid the other tokens in logits [rows, vocab] (float32). Mutates them."""
        bits = self.bits.of(words)
        powers = 1 << torch.arange(32, dtype=torch.int32, device=logits.device)
        is_forbidden = ((bits.unsqueeze(-1) & powers) == 0).view(len(bits), -1)[:, : logits.shape[1]]
        if self.rows is None:
            logits.masked_fill_(is_forbidden, -torch.inf)
        else:
            rows = self.rows.of(words)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf))


def _plan_cells(rows: Sequence[int], token_ids: Sequence[npt.NDArray[Any]], columns: PackedColumns) -> Cells | None:
    """Add the columns of the cells of each row's tokens."""
    if not any(map(len, token_ids)):
        return None
    return Cells(
        rows=columns.ints(np.repeat(rows, [len(ids) for ids in token_ids])),
        token_ids=columns.ints(np.concatenate(token_ids).astype(np.int64)),
    )


def rank_logits(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values (float32) and token ids (int64) of the best tokens, [rows, num_top], best first.

    Among equal logits the smaller token id comes first. `torch.topk` alone does not guarantee that, so it ranks one
    integer per token: the value's bits, mapped so that integers order as floats do, above the reversed id.
    """
    vocab_size = logits.shape[-1]
    values = logits.float() + 0.0  # -0.0 and 0.0 are equal, their bits are not
    if num_top == vocab_size:
        ranked = torch.sort(values, dim=-1, descending=True, stable=True)
        return ranked.values, ranked.indices
    bits = values.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # among negative floats, the larger magnitude is the smaller number
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | reversed_ids
    token_ids = torch.topk(keys, num_top, dim=-1).indices
    return values.gather(-1, token_ids), token_ids


@dataclass(frozen=True, slots=True)
class LogprobsFetch:
    """Log-probabilities on their way to the host."""

    _fetch: Fetch
    _num_rows: int
    _num_top: int

    def wait(self) -> list[Logprobs]:
        """Wait for them; return one entry per row."""
        packed = self._fetch().reshape(self._num_rows, 2 + 2 * self._num_top)
        ids, values = packed[:, : 1 + self._num_top], packed[:, 1 + self._num_top :].view("<f8")
        return [
            Logprobs(token_id=token_id, logprob=logprob, top=tuple(zip(top_ids, top_values, strict=True)))
            for (token_id, *top_ids), (logprob, *top_values) in zip(ids.tolist(), values.tolist(), strict=True)
        ]


def fetch_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobsFetch:
    """Start copying to the host the log-probabilities of one given token per row and of the num_top best ones.

    They are computed in float32 from unshaped logits [rows, vocab]; of equally probable tokens the smaller id comes
    first. token_ids is int64 [rows] on the logits' device.
    """
    wide = logits.float()
    if len(wide) == 1:  # torch adds up a lone row in parts, one per thread, and so with other bits than among others
        wide = wide.expand(2, -1)
    normalizer = torch.logsumexp(wide, dim=-1, keepdim=True)[: len(logits)]
    chosen_ids = token_ids.unsqueeze(1)
    chosen = logits.gather(-1, chosen_ids).float() - normalizer
    top_values, top_ids = rank_logits(logits, num_top)
    values = torch.cat((chosen, top_values - normalizer), dim=1).double().view(torch.int64)
    packed = torch.cat((chosen_ids, top_ids, values), dim=1)
    return LogprobsFetch(device_for(logits.device).fetch(packed.view(-1)), len(logits), num_top)


def position_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[Logprobs]:
    """Return the log-probabilities of `fetch_logprobs`, for token ids on the host. Waits for the device."""
    columns = PackedColumns()
    ids = columns.ints(token_ids)
    return fetch_logprobs(logits, ids.of(columns.upload(logits.device)), num_top).wait()
