"""Writes contents as the tokens or words that their numbers stand for.

A content is an endless sequence of units, tokens or words, of which a segment takes the first. Unit i of content c is a
hash of (seed, c, i): the same in every process, and never stored. Two contents, or one under two seeds, agree in a unit
only by chance, so that blocks of a few units differ.

Words are common English: with a leading space each is a single token of a BPE tokenizer, as are the capitalized words
that begin sentences.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.tokens import TokenArray, tokens_from_bytes
from measure.workload.sessions import Segment

_WORDS_FILE = Path(__file__).with_name("words.txt")
"""Words by class: nouns, adjectives, verbs with and without an object, adverbs, prepositions, determiners,
conjunctions, pronouns. A line that begins with a letter and a colon begins a class."""
_SENTENCES = (
    "DNVDJN.",
    "PDJNIADNVDN.",
    "SVDNPDJN.",
    "DJNPDNVDN.",
    "SAIPDJNCSVDN.",
    "CDNVDJNSAVDN.",
    "DNCDNVDJNPDN.",
    "SIPDNCDNI.",
    "DJJNAVDNPDJN.",
    "PDNSVDJN.",
    "DNIPDNA.",
    "SVDNCDNAVDJN.",
)
"""Word classes, one letter per unit; a full stop is a unit, as it is a token."""
_Words = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Slots:
    """A cycle of sentences, as slots to be filled with units of text."""

    units: tuple[str, ...]
    """Every word with a leading space, as it is and capitalized, and the full stop."""
    first: npt.NDArray[np.int64]
    """[num_slots]: index in `units` of the first word that can fill a slot."""
    count: npt.NDArray[np.uint64]
    """[num_slots]: number of words that can fill a slot."""
    begins: npt.NDArray[np.int64]
    """[num_sentences]: first slot of each sentence."""


def _make_slots() -> Slots:
    units: list[str] = ["."]
    places = {".": (0, 1)}

    def add(name: str, words: Iterable[str]) -> None:
        first = len(units)
        units.extend(f" {word}" for word in words)
        places[name] = (first, len(units) - first)

    for section in re.split(r"^(?=\w: )", _WORDS_FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, words = section.partition(": ")
        add(name, words.split())
        add(f"^{name}", (word.capitalize() for word in words.split()))
    slots = [places["^" * (not place) + name] for sentence in _SENTENCES for place, name in enumerate(sentence)]
    return Slots(
        units=tuple(units),
        first=np.array([first for first, _ in slots]),
        count=np.array([count for _, count in slots], dtype=np.uint64),
        begins=np.cumsum([0, *map(len, _SENTENCES[:-1])]),
    )


SLOTS = _make_slots()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentWriter:
    """Writes contents as tokens or as text; writers with equal fields write the same."""

    seed: int
    first_token: int = 0
    """Lowest id in use, above special tokens."""
    num_tokens: int = 1 << 20
    """Number of ids in use, 1 to 2**32."""

    def tokens(self, segments: Sequence[Segment]) -> TokenArray:
        """Return token ids from `first_token` on, below `first_token + num_tokens`; 0.2 ms for 16k of them."""
        hashes = self._plan(segments).hashes()
        ids = _below(hashes, np.uint64(self.num_tokens)) + np.uint64(self.first_token)
        return tokens_from_bytes(ids.astype("<u4").tobytes())

    def text(self, segments: Sequence[Segment]) -> str:
        """Return sentences of English words, without a space before the first; full stops count as units.

        To SmolLM2's tokenizer a unit is 1.00 tokens.
        """
        plan = self._plan(segments)
        begins = SLOTS.begins[_below(plan.keys, np.uint64(len(SLOTS.begins))).astype(np.int64)]
        slots = (np.repeat(begins, plan.lengths) + plan.places()) % len(SLOTS.first)
        chosen = SLOTS.first[slots] + _below(plan.hashes(), SLOTS.count[slots]).astype(np.int64)
        units = SLOTS.units
        return "".join([units[index] for index in chosen.tolist()]).removeprefix(" ")

    def _plan(self, segments: Sequence[Segment]) -> "_Plan":
        secret = int.from_bytes(blake2b(str(self.seed).encode(), digest_size=8).digest())
        contents = np.array([(segment.content ^ secret) & _MASK for segment in segments], dtype=np.uint64)
        lengths = np.array([segment.num_tokens for segment in segments], dtype=np.int64)
        return _Plan(_mixed(contents), lengths)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Units to write."""

    keys: _Words
    """[num_segments]: a hash of seed and content."""
    lengths: npt.NDArray[np.int64]
    """[num_segments], in units."""

    def places(self) -> npt.NDArray[np.int64]:
        """Return the place of each unit in its content, [num_units]."""
        ends = np.cumsum(self.lengths)
        return np.arange(self.lengths.sum()) - np.repeat(ends - self.lengths, self.lengths)

    def hashes(self) -> _Words:
        """Return the hash of each unit, [num_units]: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) seeded by its key."""
        with np.errstate(over="ignore"):
            return _mixed(np.repeat(self.keys, self.lengths) + self.places().astype(np.uint64) * _STEP)


def _mixed(values: _Words) -> _Words:
    """Return the values mixed by a bijection."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _below(hashes: _Words, limit: "np.uint64 | _Words") -> _Words:
    """Return numbers below the limit (at most 2**32), each from the upper half of a hash."""
    return ((hashes >> _HALF) * limit) >> _HALF
