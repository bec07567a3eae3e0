"""Blocks that were just published, for holders outside the pages: what to copy, and how a copy is known to be whole.

A published block does not change until its page is evicted. Each page counts its published *lives*: a copy that began
and ended in one life is the block's content, whichever thread made it.
"""

from array import array
from dataclasses import dataclass

from common.ids import BlockHash, BlockId, HashRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenPages:
    """What `Engine.forget` has done."""

    num_blocks: int
    """Blocks that were dropped."""
    is_in_use: bool = False
    """Whether requests or transfers hold blocks that may be among those to forget: these stay, and are cached after."""
    obstacle: str = ""
    """Why none could be dropped, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBlock:
    """A block in its page."""

    block_id: BlockId
    life: int
    """Life of the page in which the block is in it."""
    block_hash: BlockHash
    root: HashRoot
    """Root of its hash."""

    def is_in_place(self, lives: "array[int]") -> bool:
        """Whether the page still holds the block. Any thread."""
        return lives[self.block_id] == self.life
