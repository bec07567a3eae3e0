"""Chained block hashes: the content addresses of KV blocks.

hash[i] = BLAKE2b-128(hash[i-1] ‖ tokens of block i), little-endian uint32 tokens; hash[-1] is the *root*, 32 bytes,
which is keyed with the cluster's block key and seeded with everything that makes KV differ. Two blocks with equal
hashes hold equal KV, on any worker.

A prompt must not be able to name another prompt's blocks, so the hash is a cryptographic one. Its 16 bytes are enough:
finding a pair of colliding blocks takes 2**64 hashes, and computing them takes a root, which no client knows. A root is
longer than a hash, so that no block's hash can pass for a root and move a chain's middle to the beginning of a prompt.
BLAKE2b without special instructions is as fast as SHA-256 with them: 0.4 ms for 16k tokens in blocks of 16
(`benchmarks/results/hashing.json`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from common.ids import BlockHash, HashRoot
from common.tokens import TOKEN_BYTES, TokenArray

HASH_BYTES = 16
ROOT_BYTES = 32
_KEY_MASK = np.uint64((1 << 60) - 1)


class BlockHashes(Sequence[BlockHash]):
    """Hashes of consecutive blocks in one byte string, 16 bytes each. Immutable."""

    __slots__ = ("_keys", "packed")

    def __init__(self, packed: bytes = b"") -> None:
        """Raise ValueError when the length is not a multiple of 16."""
        if len(packed) % HASH_BYTES:
            raise ValueError(f"{len(packed)} bytes are not a multiple of {HASH_BYTES}, the size of a block hash")
        self.packed = packed
        self._keys: list[int] | None = None

    @classmethod
    def of(cls, hashes: Iterable[BlockHash]) -> "BlockHashes":
        """Pack hashes."""
        return cls(b"".join(hashes))

    @property
    def keys(self) -> list[int]:
        """The first 60 bits of each hash as integers of 32 bytes each. Cached: do not change the list."""
        if not self.packed:
            return []
        if self._keys is None:
            self._keys = (np.frombuffer(self.packed, dtype="<u8")[::2] & _KEY_MASK).tolist()
        return self._keys

    def digests(self) -> list[BlockHash]:
        """Return the hashes as a new list of byte strings; 15 ns each."""
        if not self.packed:
            return []
        found: list[BlockHash] = np.frombuffer(self.packed, dtype=f"V{HASH_BYTES}").tolist()
        return found

    def split(self, belongs: Sequence[bool]) -> "tuple[BlockHashes, BlockHashes]":
        """Return the hashes that belong to the first part, and the others; both in order."""
        mask = np.asarray(belongs, dtype=bool)
        if not mask.any():
            return NO_HASHES, self
        if mask.all():
            return self, NO_HASHES
        hashes = np.frombuffer(self.packed, dtype=f"V{HASH_BYTES}")
        return BlockHashes(hashes[mask].tobytes()), BlockHashes(hashes[~mask].tobytes())

    def __len__(self) -> int:
        return len(self.packed) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> "BlockHashes": ...
    def __getitem__(self, index: int | slice) -> "BlockHash | BlockHashes":
        """Return one hash, or a contiguous part."""
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"cannot slice hashes with step {step}: only consecutive ones")
            return BlockHashes(self.packed[begin * HASH_BYTES : end * HASH_BYTES])
        position = range(len(self))[index] * HASH_BYTES
        return BlockHash(self.packed[position : position + HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self.digests())

    def __add__(self, other: "BlockHashes") -> "BlockHashes":
        """Return the concatenation; reuses keys that are cached already."""
        both = BlockHashes(self.packed + other.packed)
        if self._keys is not None:
            both._keys = self._keys + other.keys
        return both

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockHashes) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"BlockHashes({[digest.hex()[:8] for digest in self.digests()]})"


NO_HASHES = BlockHashes()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTokens:
    """Tokens of leading blocks of a prompt, and the root of their hashes."""

    token_ids: TokenArray
    root: HashRoot

    def matches(self, hashes: BlockHashes, *, block_size: int) -> bool:
        """Return whether the blocks of these tokens have these hashes."""
        is_whole = len(self.root) == ROOT_BYTES and len(self.token_ids) == len(hashes) * block_size
        return is_whole and hash_blocks(self.token_ids, root=self.root, block_size=block_size) == hashes


def hash_root(*, model_fingerprint: str, cache_salt: str = "", key: bytes = b"") -> HashRoot:
    """Return the first link: equal exactly when model, dtype, layout, salt and key are equal.

    `key` is the cluster's block key, of at most 64 bytes. It is empty only where no client's prompts are cached: in
    probes, simulations and engines of one process.
    """
    seed = f"{model_fingerprint}\0{cache_salt}".encode()
    return HashRoot(hashlib.blake2b(seed, key=key, person=b"kvrelay-kv-v2", digest_size=ROOT_BYTES).digest())


def num_usable_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many leading blocks a cache can save: the last token is always computed, for its logits."""
    return (num_tokens - 1) // block_size


def extend_hash(parent: BlockHash | HashRoot, block_token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of one block that follows `parent`."""
    block = np.asarray(block_token_ids, dtype="<u4").tobytes()
    return BlockHash(hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest())


def hash_blocks(token_ids: Sequence[int], *, root: BlockHash | HashRoot, block_size: int) -> BlockHashes:
    """Return the hashes of all full blocks of `token_ids` (ints below 2**32), in order.

    `root` may be the hash of the block before them. Packed tokens are read in place.
    """
    raw = np.asarray(token_ids, dtype="<u4").tobytes()
    stride = TOKEN_BYTES * block_size
    num_blocks = len(raw) // stride
    if not num_blocks:
        return NO_HASHES
    blocks: list[bytes] = np.frombuffer(raw, dtype=f"V{stride}", count=num_blocks).tolist()
    blake2b = hashlib.blake2b
    hashes: list[bytes] = []
    parent: bytes = root
    for block in blocks:
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return BlockHashes(b"".join(hashes))


def hash_probe(root: HashRoot, block_size: int) -> BlockHash:
    """Return the hash of a fixed sequence: router and worker compare it before they trust each other's hashes."""
    return hash_blocks(range(3 * block_size), root=root, block_size=block_size)[-1]
