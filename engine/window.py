"""Windows of layers that do not see a whole text: the first key of a token is a function of its position."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Positions = TypeVar("_Positions", int, "npt.NDArray[np.int64]")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Window:
    """A window that slides with each token, or one that jumps from chunk to chunk of a text (chunked attention)."""

    num_tokens: int
    """Most tokens that a token attends to, itself included."""
    is_chunk: bool = False
    """Whether a token sees those from the last multiple of `num_tokens` on, and not the latest `num_tokens`."""

    def first_visible(self, positions: _Positions) -> _Positions:
        """Return the position of the first key of a token, or of each token; below 0 where a text begins behind it."""
        if self.is_chunk:
            return positions // self.num_tokens * self.num_tokens
        return positions - self.num_tokens + 1

    def __repr__(self) -> str:
        """A number alone slides: fingerprints are those of versions without chunks."""
        return f"chunks of {self.num_tokens}" if self.is_chunk else str(self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWindow:
    """A window over the blocks of a text."""

    window: Window
    block_size: int

    def first_needed(self, num_blocks: int) -> int:
        """Return the first block of which the last token of so many leading blocks sees something."""
        return max(0, self.window.first_visible(num_blocks * self.block_size - 1)) // self.block_size
