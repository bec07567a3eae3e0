"""Words for prompts of text, and sentences to put them in.

Common English words; with a space before it each is a single token to a BPE tokenizer, and so is a capitalized one of
those that begin sentences.
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
"""Word classes, one letter a unit; a full stop is a unit of its own, as it is a token."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Sentences that follow each other in a circle, as slots that are filled with units of text."""

    units: tuple[str, ...]
    """Every word with the space before it, as it is and with a capital, and the full stop."""
    first: npt.NDArray[np.int64]
    """[num_slots]: where the words that can fill a slot begin in `units`."""
    count: npt.NDArray[np.uint64]
    """[num_slots]: how many there are."""
    begins: npt.NDArray[np.int64]
    """[num_sentences]: the slot with which each sentence begins."""


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
