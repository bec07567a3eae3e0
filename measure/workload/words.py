"""Words for prompts of text, and sentences to put them in.

Common English words; with a space before it each is a single token to a BPE tokenizer, and so is a capitalized one of
those that begin sentences.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_CLASSES = {
    "N": """
        air animal answer apple area arm army art autumn bag ball bank bed bell bird board boat body book bottle box
        boy branch bread bridge brother building bus butter camera camp captain car card cat cell chair chance chest
        child church circle city class clock cloud coast coat coffee color corner country couple cow crowd cup day
        daughter desk dinner doctor dog door dream dress driver ear earth edge egg engine evening eye face family farm
        farmer father field finger fire fish flag floor flower food foot forest friend fruit game garden gate girl
        glass gold grass ground group guard guest hair hall hand hat head heart hill history home horse hospital hotel
        hour house idea island job journey judge key king kitchen lady lake lamp land language law leader leaf lesson
        letter library light line lion list machine man map market meal message metal milk mind minute mirror moment
        money month moon morning mother mountain mouth movie museum music name neck night noise nose note number nurse
        object ocean office oil orange order owner page paper parent park part party path peace pen person phone photo
        picture piece place plan plane plant plate player pocket poem point police price prince problem queen question
        rain reason report rice ring river road rock roof room rule sailor salt school sea season seat second secret
        shadow ship shirt shoe shop shoulder side sign silver singer sister size skin sky smile snow soldier son song
        sound soup spirit spring square star station stone store storm story street student sugar summer sun table
        teacher team test thing thought ticket time tower town toy train tree trip truth uncle valley victim village
        visitor voice wall war watch water way week wheel wife wind window winter witness woman wood word work worker
        world writer year
    """,
    "J": """
        ancient angry big black blue bold brave bright broad broken brown busy calm careful cheap clean clear clever
        cold common cool curious dark dead deep distant dry early easy empty famous fast final fine first flat foreign
        free fresh friendly full gentle golden good grand gray great green half happy hard heavy hidden high huge
        hungry important innocent joint kind large last late lazy light little local lonely long loud low lucky main
        modern narrow natural new nice noble old open other patient perfect plain pleasant poor pretty private proud
        public pure quick quiet rare ready real red rich rough round royal sad safe second secret serious sharp short
        silent simple single slow small smooth soft solid sorry special steady still strange strong sudden sweet tall
        thick thin tiny tired true ugly useful usual warm weak wet white whole wide wild wise wonderful wrong yellow
        young
    """,
    "V": """
        accepted admired answered approached asked avoided became believed bought broke brought built called carried
        caught changed chose cleaned closed collected covered crossed cut described designed discovered drew dropped
        enjoyed entered explained felt filled finished followed forgot found gave got guarded had heard held helped
        hid hit imagined improved invited joined kept killed knew learned left liked lost loved made measured met
        missed moved needed noticed offered opened ordered owned painted passed played pointed prepared protected
        pulled pushed put raised reached read received recognized remembered repeated returned saved saw searched
        sent served shared showed sold spent started stopped studied taught threw told took touched tried turned
        understood used visited wanted warned washed watched won wore wrote
    """,
    "I": """
        appeared arrived began came changed continued cried danced died disappeared fell flew grew helped hurried
        jumped landed laughed lived looked moved played rested returned rose sang slept smiled spoke stayed stood
        stopped swam traveled turned waited walked went worked
    """,
    "A": """
        again already always carefully certainly clearly early easily finally gently happily immediately
        usually later naturally nearly never now often once perhaps probably quickly quietly rarely
        really simply slowly softly sometimes soon still suddenly then thus today together tomorrow well yesterday yet
    """,
    "P": """
        about above across after against along among around at before behind below between beyond by
        during for from in inside into like near of on outside over past through to toward under until upon
        with within without
    """,
    "D": "the the the the this that every one another some each our their his her my your",
    "C": "and but while because before after when until so although if",
    "S": "he she they we it I you everyone nobody",
}
"""Nouns, adjectives, verbs with and without an object, adverbs, prepositions, determiners, conjunctions, pronouns."""

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

    for name, words in _CLASSES.items():
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
