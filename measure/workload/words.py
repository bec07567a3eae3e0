"""Words and sentence patterns for prompts of text.

The words are common English; with a leading space each is a single token of a BPE tokenizer, as are the capitalized
words that begin sentences.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
