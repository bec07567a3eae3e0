"""The request of a pull, and the check that the manifest and the blocks that arrived satisfy it."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from common.block_hash import BlockHashes, PrefixTokens
from common.errors import KvIncomplete
from common.ids import NO_ROOT, BlockHash, HandoffId, HashRoot
from common.tokens import TOKEN_BYTES, tokens_from_bytes
from kv_transfer.handoff import FirstToken, HandoffManifest
from kvrelay.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedHandoff:
    """All of one prompt's KV, and its first tokens: complete, or not at all."""

    handoff_id: HandoffId
    num_tokens: int
    num_blocks: int
    last_block_hash: BlockHash | None
    num_samples: int
    """Samples with a first token in the manifest; beams have none."""
    first_sample_index: int

    takes_offloaded = False

    def __str__(self) -> str:
        return str(self.handoff_id)

    def ask(self, opened: pb.OpenFetch) -> None:
        """Name in `opened` what is wanted."""
        opened.handoff_id = self.handoff_id

    def verify(self, manifest: pb.Manifest, missing: AbstractSet[int]) -> HandoffManifest:
        """Return the manifest when it and the blocks that arrived are as wanted. Raises KvIncomplete."""
        if missing:
            raise KvIncomplete(f"{len(missing)} blocks of {self} are missing")
        samples = [self.first_sample_index + i for i in range(self.num_samples)]
        expected = (self.num_tokens, self.num_blocks, self.last_block_hash or b"", samples)
        first_samples = [token.sample_index for token in manifest.first_tokens]
        got = (manifest.num_tokens, manifest.num_blocks, manifest.last_block_hash, first_samples)
        if got != expected:
            raise KvIncomplete(f"manifest of {self} says {got}; expected {expected}")
        return HandoffManifest(
            num_tokens=manifest.num_tokens,
            num_blocks=manifest.num_blocks,
            last_block_hash=self.last_block_hash,
            first_tokens=tuple(
                FirstToken(sample_index=t.sample_index, token_id=t.token_id, finished=t.finished)
                for t in manifest.first_tokens
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBlocks:
    """Leading blocks of a prompt: as many as the peer has cached."""

    hashes: BlockHashes
    """From the first block of the prompt on, including those that are here already."""
    block_size: int
    root: HashRoot = NO_ROOT
    """Root of the hashes; empty when it is not known: then nothing comes out of the peer's tiers."""

    @property
    def takes_offloaded(self) -> bool:
        """Whether blocks out of tiers may come, as chunks beside the messages of the transport."""
        return bool(self.root)

    def __str__(self) -> str:  # never the hashes: they are a right to fetch what they name
        return f"{len(self.hashes)} cached blocks"

    def ask(self, opened: pb.OpenFetch) -> None:
        """Name in `opened` what is wanted."""
        opened.block_hashes, opened.hash_root = self.hashes.packed, self.root

    def verify(self, manifest: pb.Manifest, missing: AbstractSet[int]) -> HandoffManifest:
        """Return the manifest, whose num_blocks leading blocks are all here now. Raises KvIncomplete."""
        num_blocks = manifest.num_blocks
        if num_blocks > len(self.hashes):
            raise KvIncomplete(f"the manifest has {num_blocks} blocks; {self} were asked for")
        is_whole = num_blocks == len(self.hashes)  # then their window pages come, too
        num_absent = sum(1 for i in missing if i < num_blocks or is_whole)
        if num_absent:
            raise KvIncomplete(f"{num_absent} of {num_blocks} blocks are missing")
        last_hash = self.hashes[num_blocks - 1] if num_blocks else None
        expected = (num_blocks * self.block_size, last_hash or b"", 0)
        if (manifest.num_tokens, manifest.last_block_hash, len(manifest.first_tokens)) != expected:
            raise KvIncomplete(f"the manifest of {self} does not match its {num_blocks} blocks")
        return HandoffManifest(
            num_tokens=manifest.num_tokens,
            num_blocks=num_blocks,
            last_block_hash=last_hash,
            first_tokens=(),
            prefix=self._prefix(manifest),
            offloaded_wait_s=manifest.offloaded_wait_s,
        )

    def _prefix(self, manifest: pb.Manifest) -> PrefixTokens | None:
        if not manifest.tokens:
            return None
        if len(manifest.tokens) != TOKEN_BYTES * manifest.num_tokens:
            raise KvIncomplete(f"the manifest of {self} has {len(manifest.tokens)} bytes of tokens")
        prefix = PrefixTokens(token_ids=tokens_from_bytes(manifest.tokens), root=HashRoot(manifest.hash_root))
        if not prefix.matches(self.hashes[: manifest.num_blocks], block_size=self.block_size):
            raise KvIncomplete(f"the manifest of {self} has the tokens of other blocks")
        return prefix


Wanted = WantedHandoff | WantedBlocks
