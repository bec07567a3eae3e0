"""Our names of the blocks in vLLM's prefix cache, from the events of its block pool.

vLLM names a block by a hash of its own. Its events say which tokens a block has and what is before it, and the salt at
the beginning is the root of our chain: so each block has our name, too. vLLM may have a block twice; it is here while
one is left.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from common.block_hash import ROOT_BYTES, BlockHashes, PrefixTokens, hash_blocks
from common.eviction import EvictionClass, EvictionOrder
from common.ids import BlockHash, HashRoot
from common.kv_events import KvEvents
from common.tokens import TokenArray, as_tokens
from engine.vllm.errands import BlocksStored, StepBegun


def salt_of(root: HashRoot) -> str:
    """Return the cache salt of the prompts below a root."""
    return root.hex()


@dataclass(slots=True)
class _Block:
    name: bytes
    """vLLM's name."""
    parent: BlockHash | HashRoot
    """Our name of the block before it, or the root of its prompt."""
    token_ids: TokenArray
    num_copies: int = 0
    is_reused: bool = False


class CacheMirror:
    """The blocks of one vLLM's prefix cache; an `engine.pages.hot_prefixes.RankedBlocks`."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[bytes, BlockHash] = {}
        """Our names by vLLM's."""
        self._blocks: dict[BlockHash, _Block] = {}
        self._order: EvictionOrder[BlockHash] = EvictionOrder()
        """Those that were found again last come last. vLLM evicts by an order of its own."""

    @property
    def num_blocks(self) -> int:
        """Cached blocks, each counted once."""
        return len(self._blocks)

    def snapshot(self) -> KvEvents:
        """Return all cached blocks."""
        return KvEvents(stored=BlockHashes.of(self._blocks), is_snapshot=True)

    def has_root(self, root: HashRoot) -> bool:
        """Whether the beginning of some prompt below a root is cached."""
        return any(block.parent == root for block in self._blocks.values())

    def vllm_names(self, hashes: BlockHashes) -> tuple[bytes, ...]:
        """Return vLLM's names of the longest cached prefix."""
        return tuple(self._blocks[ours].name for ours in takewhile(self._blocks.__contains__, hashes))

    def tokens(self, hashes: BlockHashes) -> PrefixTokens:
        """Return the tokens of leading blocks of a prompt, which are cached; there is at least one."""
        token_ids = array("I")
        for ours in hashes:
            token_ids += self._blocks[ours].token_ids
        return PrefixTokens(token_ids=token_ids, root=HashRoot(self._blocks[hashes[0]].parent))

    def apply(self, step: StepBegun) -> KvEvents:
        """Take the changes that came with a step; returns what they mean to a reader of our names."""
        before: dict[BlockHash, int] = {}
        if step.is_cleared:
            before = {ours: block.num_copies for ours, block in self._blocks.items()}
            self._names, self._blocks, self._order = {}, {}, EvictionOrder()
        for change in step.changes:
            for name, count in self._store(change) if isinstance(change, BlocksStored) else self._remove(change):
                before.setdefault(name, count)
        return KvEvents(
            stored=BlockHashes.of(name for name, count in before.items() if not count and name in self._blocks),
            removed=BlockHashes.of(name for name, count in before.items() if count and name not in self._blocks),
        )

    # ── hot prefixes ────────────────────────────────────────────────────────────────────────────────────────────────

    def mark_reused(self, hashes: BlockHashes) -> None:
        """Note that a request has found these leading blocks of its prompt."""
        for ours in reversed(hashes.digests()):
            if (block := self._blocks.get(ours)) is not None:
                block.is_reused = True
                self._order.remove(ours)
                self._order.put(ours, EvictionClass.WARM)

    def hottest(self) -> Iterator[tuple[float, BlockHash]]:
        """Yield values and blocks, the most valuable first, without those behind a block that has left."""
        whole: set[BlockHash | HashRoot] = set()
        for value, ours in self._order.by_value():
            path: list[BlockHash | HashRoot] = []
            at: BlockHash | HashRoot = ours
            while at not in whole and at in self._blocks:
                path.append(at)
                at = self._blocks[BlockHash(at)].parent
            if at in whole or len(at) == ROOT_BYTES:
                whole.update(path)
                yield value, ours

    def parent_of(self, block: BlockHash) -> BlockHash | None:
        """Return the block before one; None for the first block of a prompt."""
        parent = self._blocks[block].parent
        return None if len(parent) == ROOT_BYTES else BlockHash(parent)

    def hash_of(self, block: BlockHash) -> BlockHash:
        """Return our name of a block."""
        return block

    def is_reused(self, block: BlockHash) -> bool:
        """Whether a request has found it."""
        return self._blocks[block].is_reused

    # ── changes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _store(self, stored: BlocksStored) -> Iterable[tuple[BlockHash, int]]:
        """Add blocks; yields our name of each and how often it was there."""
        parent: BlockHash | HashRoot
        if stored.parent is None:
            parent = HashRoot(bytes.fromhex(stored.salt))
        elif stored.parent in self._names:
            parent = self._names[stored.parent]
        else:  # its parent left in the same step
            return
        token_ids, size = as_tokens(stored.token_ids), self._block_size
        names = hash_blocks(token_ids, root=parent, block_size=size)
        for i, (theirs, ours) in enumerate(zip(stored.hashes, names, strict=True)):
            if ours not in self._blocks:
                self._names[theirs] = ours
                self._blocks[ours] = _Block(theirs, parent, token_ids[i * size : (i + 1) * size])
                self._order.put(ours, EvictionClass.COLD)
            block, parent = self._blocks[ours], ours
            yield ours, block.num_copies
            block.num_copies += 1

    def _remove(self, theirs: bytes) -> Iterable[tuple[BlockHash, int]]:
        """Remove one copy of a block; yields as `_store` does."""
        ours = self._names.get(theirs)
        if ours is None:
            return
        block = self._blocks[ours]
        yield ours, block.num_copies
        block.num_copies -= 1
        if not block.num_copies:
            del self._names[theirs], self._blocks[ours]
            self._order.remove(ours)
