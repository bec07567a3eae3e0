"""How long snapshots of recurrent layers' states are kept: by their place in a text, and by who went on from them.

A state is as large as hundreds of tokens, so a cache holds few of them. A chat goes on from the end of its latest
answer, or of its latest prompt where a template leaves thoughts out of the history; whichever of the two is hardly ever
used is not worth a page. A snapshot from which one sequence went on is mostly a turn of a chat that has moved on; one
from which several did is a prompt that they share, as is the place where a prompt left a known text: it is kept from
then on. (Marconi, arXiv:2411.19379, chooses the same places.)
"""

import enum
from array import array

from common.eviction import EvictionClass


class Place(enum.IntEnum):
    """Place of a snapshot in the text of the sequence that left it."""

    INSIDE = 0
    """End of a step."""
    FORK = 1
    """Where a prompt left a text that was known."""
    PROMPT_END = 2
    ANSWER_END = 3


_RARE = 4
"""Factor by which ends of one kind are used less often than those of the other, so that they are not kept."""
_MEMORY = 256
"""Uses after which older ones count half."""


class Snapshots:
    """The snapshots of one worker's blocks. Engine thread only."""

    def __init__(self, num_blocks: int) -> None:
        self._num_uses = array("i", [0]) * num_blocks
        self._place_of = bytearray(num_blocks)
        self._uses_of_ends = {Place.PROMPT_END: 0, Place.ANSWER_END: 0}

    def begin(self, block_id: int) -> None:
        """Forget the last life of a block."""
        self._num_uses[block_id] = self._place_of[block_id] = 0

    def used(self, block_id: int) -> None:
        """Count a sequence that goes on from a snapshot."""
        self._num_uses[block_id] += 1

    def wanted(self, block_id: int) -> None:
        """Count a sequence whose text is known up to a block: it would go on from there, if there is a snapshot."""
        place = Place(self._place_of[block_id])
        if place in self._uses_of_ends:
            self._uses_of_ends[place] += 1
            if sum(self._uses_of_ends.values()) > _MEMORY:
                self._uses_of_ends = {end: uses // 2 for end, uses in self._uses_of_ends.items()}

    def leave(self, block_id: int, place: Place) -> EvictionClass:
        """Note where a sequence has left a snapshot, or passed one; returns how long it is kept."""
        before, num_uses = Place(self._place_of[block_id]), self._num_uses[block_id]
        is_continued = place is Place.FORK and before in self._uses_of_ends  # the text ended there, and has gone on
        if place > before:
            self._place_of[block_id] = before = place
        if num_uses > 1 or (num_uses and before is Place.FORK):
            return EvictionClass.WARM
        if num_uses or is_continued or before is Place.INSIDE or self._is_rarely_used(before):
            return EvictionClass.BRIEF
        return EvictionClass.COLD

    def _is_rarely_used(self, place: Place) -> bool:
        uses = self._uses_of_ends.get(place)
        return uses is not None and uses * _RARE < max(self._uses_of_ends.values())
