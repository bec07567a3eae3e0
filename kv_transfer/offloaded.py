"""The seam between the serving side and the blocks that a worker has outside its pages."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from common.block_hash import BlockHashes
from common.ids import HashRoot
from kvrelay.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBlocks:
    """Blocks that a puller wants."""

    puller: str
    """Peer whose share of the buffers they take."""
    first_block: int
    """Index of the first of them among the blocks of the prompt."""
    hashes: BlockHashes
    root: HashRoot
    """Root of the hashes."""
    chunk_bytes: int
    """Most bytes of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedPiece:
    """The first of them."""

    num_blocks: int = 0
    """0: there are none."""
    messages: Sequence[pb.FetchBlocksResponse] = ()
    """Messages that bring them."""


class Offloaded(Protocol):
    """Blocks outside the pages. Event loop only."""

    def num_held(self, hashes: BlockHashes, first_block: int) -> int:
        """Return how many leading blocks a puller has once it has got these, if it has those before `first_block`."""
        ...

    def piece(self, wanted: OffloadedBlocks) -> AbstractAsyncContextManager[OffloadedPiece]:
        """Hold verified bytes of the first wanted blocks in a buffer, as many as are there and as it takes.

        Waits for a buffer: there are so many for all pullers, and fewer for each of them.
        """
        ...
