"""A step in flight on a device: what it samples and fetches, and its results."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from engine.device.columns import Column, PackedColumns
from engine.device.devices import Fetch, errors_of_device
from engine.executor import Hidden, ScheduledSequence, StepResult
from engine.model.decoder import Decoder
from engine.ops.metadata import AttentionMetadata
from engine.sampling.device_draw import RaceColumns
from engine.sampling.draw import first_best
from engine.sampling.logits import LogprobsFetch
from engine.sampling.plan import Chosen, SamplingPlan
from engine.sampling.sampler import Sampler, sampling_rows


@dataclass(frozen=True, slots=True)
class PooledFetch:
    """Parts of embeddings on their way to the host."""

    _fetch: Fetch
    _item_idxs: tuple[int, ...]

    def wait(self) -> Iterator[tuple[int, Hidden]]:
        """Wait for them; yield each with the index of its scheduled sequence."""
        rows = self._fetch().view("<f8").reshape(len(self._item_idxs), -1).astype(np.float32)
        yield from zip(self._item_idxs, rows, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """Samples of which those that nothing shapes are chosen."""

    logits: Tensor
    """float32 [num_samples, vocab_size]."""
    token_ids: Tensor
    """int64 [num_samples]; of plain rows and of those that race."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesPlan:
    """Samples of a ragged step."""

    last_tokens: Column
    """Place of each sampled sequence's last token in the step, int64."""
    repeats: Column | None
    """Index of each sample's sequence among the sampled ones, int64; None: each has one sample."""
    race: RaceColumns
    sampling: SamplingPlan | None
    """None: it is made when all inputs are known."""

    @classmethod
    def of(
        cls, batch: Seq[ScheduledSequence], metadata: AttentionMetadata, sampler: Sampler, columns: PackedColumns
    ) -> "SamplesPlan | None":
        """Add the columns; None when nothing is sampled."""
        due = [i for i, item in enumerate(batch) if item.num_samples]
        if not due:
            return None
        num_samples = [batch[i].num_samples for i in due]
        rows = [row for i in due for row in sampling_rows(batch[i])]
        return cls(
            last_tokens=columns.ints(metadata.query_start_loc[1:][due] - 1),
            repeats=columns.ints(np.repeat(np.arange(len(due)), num_samples)) if max(num_samples) > 1 else None,
            race=RaceColumns.add(rows, len(rows), columns),
            sampling=None if chooses_late(batch) else sampler.plan_rest(rows, columns),
        )

    def run_race(self, model: Decoder, hidden: Tensor, words: Tensor) -> Raced:
        """Choose for the samples that race, given all tokens' hidden states."""
        logits = model.logits(hidden.index_select(0, self.last_tokens.of(words)))
        if self.repeats is not None:
            logits = logits.index_select(0, self.repeats.of(words))
        return Raced(logits=logits, token_ids=self.race.choose(logits, first_best(logits), words))


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight; a `StepHandle`."""

    num_samples: tuple[int, ...]
    chosen: Chosen | None
    """None: nothing is sampled, or later."""
    choose_late: Callable[[], Chosen] | None
    prompt_logprobs: tuple[tuple[int, LogprobsFetch], ...]
    """(index of a scheduled sequence, some log-probabilities of its prompt), in order."""
    pooled: PooledFetch | None = None
    ended: Fetch | None = None
    """Copy after the whole step; None when the copy of the chosen tokens is."""

    @errors_of_device()
    def choose(self) -> None:
        """See `StepHandle`."""
        if self.chosen is None and self.choose_late is not None:
            self.chosen = self.choose_late()

    @errors_of_device()
    def results(self) -> list[StepResult]:
        """Wait for the step's copies; see `StepHandle`."""
        sampled = iter(self.chosen.materialize() if self.chosen is not None else ())
        results = [
            StepResult(sampled=list(islice(sampled, num_samples)), prompt_logprobs=[])
            for num_samples in self.num_samples
        ]
        for item_idx, fetch in self.prompt_logprobs:
            results[item_idx].prompt_logprobs.extend(fetch.wait())
        for item_idx, part in self.pooled.wait() if self.pooled is not None else ():
            results[item_idx].pooled = part
        if self.ended is not None:
            self.ended()
        return results


def chooses_late(batch: Seq[ScheduledSequence]) -> bool:
    """Return whether the tokens of a batch are chosen once those of the step before are known."""
    return any(item.chooses_late for item in batch)
