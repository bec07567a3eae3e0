"""Beam search: which of the candidates for the next token of each beam go on, and which complete an answer.

The rules are those of `generate(num_beams=n, do_sample=False)` of transformers (generation/utils.py, `_beam_search`):

1. Each beam has as candidates its best next tokens with their log-probabilities. All candidates of a step are ranked by
   the sum of log-probabilities of all their tokens.
2. Those of the n best that end (end token, stop token, or longest answer) are complete. An answer's score is its sum /
   length ** length_penalty, where the length counts the end token. The n best complete answers are kept.
3. The n best that do not end are the beams of the next step.
4. The search is over at the longest answer; or when there are n complete answers and either `early_stopping` is set or
   the best beam, scored at its present length, is no better than the worst of them.

Sums are double; transformers' are float32. Among equal sums, the better beam of the step before comes first, then the
token that `rank_logits` ranks first (the smaller id); among equal scores, the earlier answer. So the outcome is a pure
function of the candidates.
"""

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens

SNAPSHOT_TOKENS = 32
"""Fewest steps between two snapshots: at most about as many are repeated when a worker is lost."""
MAX_SNAPSHOT_TOKENS = 1 << 18
"""Most tokens of a snapshot, 4 bytes each; a larger search goes on from its last one that was smaller."""

Candidates = tuple[tuple[int, float], ...]
"""The best next tokens of a beam and their log-probabilities, best first."""


def num_candidates(sampling: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> int:
    """Return how many candidates of one beam suffice: n that go on, and every token that ends."""
    return min(vocab_size, sampling.n + len(sampling.end_token_ids(eos_token_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A beam of the next step."""

    parent: int
    """Rank of the beam that it continues."""
    token_id: int
    logprob: float
    """Sum over all its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A complete answer."""

    score: float
    token_ids: TokenArray
    has_end: bool
    """Whether its last token is one that ends; otherwise it is as long as allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBeam:
    """A beam and the sum of the log-probabilities of its tokens."""

    token_ids: TokenArray
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSnapshot:
    """A search after some step: with the request, all that the rest of it depends on."""

    live: tuple[LiveBeam, ...]
    """At least one beam; equally long, best first."""
    complete: tuple[Hypothesis, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that each live beam has generated."""
        return len(self.live[0].token_ids)


class BeamSearch:
    """The beams of one request. Knows nothing of pages."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        eos_token_ids: Collection[int],
        max_tokens: int,
        begun: BeamSnapshot | None = None,
    ) -> None:
        """`max_tokens`: length of the longest answer. `begun`: the search goes on from there."""
        self.logprobs: list[float] = [0.0]
        """Sum of log-probabilities of each beam, best first; one beam, the prompt, at the start."""
        self.num_tokens = 0
        """Tokens that each beam has generated."""
        self.complete: list[Hypothesis] = []
        """At most n complete answers, best first."""
        self._sampling = sampling
        self._ends = sampling.end_token_ids(eos_token_ids)
        self._max_tokens = max_tokens
        if begun is not None:
            self.logprobs = [beam.logprob for beam in begun.live]
            self.num_tokens = begun.num_tokens
            self.complete = list(begun.complete)
        self._next_snapshot = self.num_tokens + SNAPSHOT_TOKENS

    def due_snapshot(self, outputs: Seq[TokenArray]) -> BeamSnapshot | None:
        """Return the present state when it is time to send one: after some tokens, later ones ever less often.

        `outputs` are the tokens of the beams. All states together hold few times as many tokens as the last one.
        """
        if self.num_tokens < self._next_snapshot:
            return None
        self._next_snapshot = self.num_tokens + max(SNAPSHOT_TOKENS, self.num_tokens // 4)
        num_tokens = sum(map(len, outputs)) + sum(len(hypothesis.token_ids) for hypothesis in self.complete)
        if num_tokens > MAX_SNAPSHOT_TOKENS:
            return None
        live = zip(outputs, self.logprobs, strict=True)
        return BeamSnapshot(
            live=tuple(LiveBeam(token_ids=token_ids, logprob=logprob) for token_ids, logprob in live),
            complete=tuple(self.complete),
        )

    def advance(self, candidates: Seq[Candidates], output_of: Callable[[int], TokenArray]) -> list[Child]:
        """Take one step, given the candidates of each beam. Returns the next beams, best first; none: it is over.

        `output_of` returns the tokens of a beam before the step.
        """
        width = self._sampling.n
        self.num_tokens += 1
        is_last = self.num_tokens >= self._max_tokens
        ranked = self._rank(candidates)
        for child in ranked[:width]:
            if is_last or child.token_id in self._ends:
                self._complete(child, output_of(child.parent))
        self.complete.sort(key=lambda hypothesis: -hypothesis.score)
        del self.complete[width:]
        children = [] if is_last else [child for child in ranked if child.token_id not in self._ends][:width]
        if not children or self._is_decided(children[0]):
            self.logprobs = []
            return []
        self.logprobs = [child.logprob for child in children]
        return children

    def _rank(self, candidates: Seq[Candidates]) -> list[Child]:
        must_continue = self.num_tokens <= self._sampling.min_tokens
        ranked = [
            Child(parent=rank, token_id=token_id, logprob=self.logprobs[rank] + logprob)
            for rank, best in enumerate(candidates)
            for token_id, logprob in best
            if not (must_continue and token_id in self._ends)
        ]
        return sorted(ranked, key=lambda child: -child.logprob)

    def _complete(self, child: Child, output: TokenArray) -> None:
        self.complete.append(
            Hypothesis(
                score=self._score(child),
                token_ids=output + as_tokens((child.token_id,)),
                has_end=child.token_id in self._ends,
            )
        )

    def _is_decided(self, best: Child) -> bool:
        if len(self.complete) < self._sampling.n:
            return False
        return self._sampling.early_stopping or self._score(best) <= self.complete[-1].score

    def _score(self, child: Child) -> float:
        return child.logprob / math.pow(self.num_tokens, self._sampling.length_penalty)
