"""The seam between bookkeeping and arithmetic.

Above it (scheduler, block pool, loop) nothing knows tensors; below it (model runner, sampler, KV store) nothing knows
queues. `engine.runner.ModelExecutor` computes with torch; `engine.fake.FakeExecutor` computes a hash of the pages.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from common.ids import BlockId
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape of one block; equal fingerprints mean exchangeable blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """Such as "bfloat16"."""
    bytes_per_element: int
    fingerprint: str
    """Hash of model weights, dtype and everything above."""

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_element

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on the wire: contiguous [num_layers, 2, block_size, num_kv_heads, head_dim]."""
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegion:
    """Where another process of this host finds the pages: an anonymous memory file, gone with its last user."""

    fd: int
    size_bytes: int
    nonce: bytes
    """Random bytes stored in the last 16 bytes of the region."""


class KvStore(Protocol):
    """The pages' bytes. Reads and writes of blocks that the caller holds are safe from any thread."""

    shape: KvShape
    num_blocks: int
    shared_region: SharedRegion | None
    """None when the pages are not in shareable host memory."""

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes, [len(block_ids) * block_bytes]."""
        ...

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes laid out as `read_blocks` returns them."""
        ...

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block inside the pool. Engine thread only."""
        ...

    def map_peer(self, region: memoryview, num_blocks: int) -> "PeerPages":
        """Interpret another process's region (same shape) as pages."""
        ...


class PeerPages(Protocol):
    """Pages of another process, mapped read-only."""

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities at one position, from the unshaped distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A chosen token."""

    token_id: int
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens)."""

    sequence: Sequence
    num_new_tokens: int
    num_samples: int
    """0 while the chunk ends before the last known token; n for a prompt with n samples; else 1."""


@dataclass(slots=True)
class StepResult:
    """Output for one ScheduledSequence."""

    sampled: list[Sampled]
    """num_samples entries; entry j belongs to sample_index + j."""
    prompt_logprobs: list[Logprobs]
    """When asked for: one entry per scheduled position p with p + 1 inside the prompt, telling of token p + 1."""


class Executor(Protocol):
    """Computes steps. Engine thread only."""

    kv: KvStore
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_name: str

    def execute(self, batch: Seq[ScheduledSequence]) -> list[StepResult]:
        """Run one step: write KV of all new tokens, sample where asked. Does not mutate the sequences.

        Every sequence's block_table covers num_computed + num_new_tokens tokens.
        """
        ...
