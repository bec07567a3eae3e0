"""Decoding without a plan for every step: for a driver that knows the tokens of its answers beforehand.

`EngineThread` has every step planned, computed and taken (`EngineCore.begin_step`, `finish_step`), and leaves the set
below empty. The simulator (`measure/simulate/leap.py`) skips plans: it puts decoding sequences into the set, lets time
pass over steps in which they need nothing from the host, and then brings them up to date here. Tokens, pages and cached
blocks are the same as after planning each of these steps (tests/measure/simulate/test_leap.py).
"""

from collections.abc import Collection

from common.tokens import TokenArray
from engine.block_pool import BlockPool
from engine.pages import Pages
from engine.sequence import Sequence


class UnplannedDecodes:
    """Running sequences of one core that decode without being planned. Engine thread only, between two steps.

    The scheduler counts them in every step and plans none of them. When pages run out, the driver brings all of them up
    to date and empties the set before the next plan: nothing is preempted while it is not empty.
    """

    def __init__(self, pool: BlockPool, pages: Pages) -> None:
        self._pool = pool
        self._pages = pages
        self.sequences: Collection[Sequence] = ()
        self.num_context_tokens = 0
        """Tokens that the sequences read in the next step, together."""

    def take_page(self, sequence: Sequence) -> bool:
        """Take the page for the next token of a sequence whose pages are full. False when none is free."""
        if self._pool.num_free == 0:
            return False
        copy = self._pages.make_writable(sequence, 1)
        assert copy is None, f"page {copy} is shared; only full pages may be left behind"
        return True

    def advance(self, sequence: Sequence, token_ids: TokenArray) -> None:
        """Apply steps that each computed one token and sampled the next of `token_ids`.

        `take_page` was called before each step that needed a page.
        """
        sequence.num_computed += len(token_ids)
        sequence.num_ready += len(token_ids)
        sequence.append_tokens(token_ids)
        self._pages.publish(sequence)
