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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRegion:
    """Where another process on the same card finds the pages."""

    handle: bytes
    """Of the device allocation that holds them (cudaIpcMemHandle_t)."""
    offset_bytes: int
    """Where in that allocation the pages begin."""
    size_bytes: int
    device_uuid: str
    nonce: bytes
    """Random bytes stored in the last 16 bytes of the region."""


class DevicePeerPages(Protocol):
    """Pages of another process in the memory of our own device. Any thread."""

    def copy_blocks(self, sources: Seq[int], targets: Seq[BlockId]) -> None:
        """Copy the peer's pages into ours; they are there when this returns. Raises LayoutMismatch for a bad id."""
        ...

    def close(self) -> None:
        """Unmap the pages; no copy is running."""
        ...


class DeviceSharing(Protocol):
    """Pages in device memory, as one that processes on the same card may map."""

    region: DeviceRegion

    def map_peer(self, region: DeviceRegion, num_blocks: int) -> DevicePeerPages:
        """Map another process's region of equally shaped pages. Takes milliseconds. Raises TransferError."""
        ...


class KvStore(Protocol):
    """The pages' bytes. Reads and writes of blocks that the caller holds are safe from any thread."""

    shape: KvShape
    num_blocks: int
    shared_region: SharedRegion | None
    """None when the pages are not in shareable host memory."""
    device_sharing: DeviceSharing | None
    """None when the pages are not in device memory, or the device cannot share it."""

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes, [len(block_ids) * block_bytes]."""
        ...

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes laid out as `read_blocks` returns them."""
        ...

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block inside the pool: after the steps launched so far, before the next. Engine thread only."""
        ...

    def map_peer(self, region: memoryview, num_blocks: int) -> "PeerPages":
        """Interpret another process's region (same shape) as pages. Raises LayoutMismatch when its size is wrong."""
        ...


class PeerPages(Protocol):
    """Pages of another process, mapped read-only."""

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes. Raises LayoutMismatch for a bad id."""
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
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens), as of `launch`."""

    sequence: Sequence
    num_new_tokens: int
    num_samples: int
    """0 while the chunk ends before the last token; n for a prompt with n samples; else 1."""
    input_row: int | None = None
    """Overlapped: the chunk is one token whose id the host does not know yet. It is row `input_row` of the tokens that
    the step launched just before samples; rows are all samples of that batch in order, item 0's num_samples first."""

    @property
    def token_index(self) -> int:
        """Index, among the generated tokens, of the one that this step samples. Valid inside `launch`."""
        return self.sequence.num_output_tokens + (self.input_row is not None)


@dataclass(slots=True)
class StepResult:
    """Output for one ScheduledSequence."""

    sampled: list[Sampled]
    """num_samples entries; entry j belongs to sample_index + j."""
    prompt_logprobs: list[Logprobs]
    """When asked for: one entry per scheduled position p with p + 1 inside the prompt, telling of token p + 1."""


class StepHandle(Protocol):
    """A launched step. Engine thread only."""

    def results(self) -> list[StepResult]:
        """Wait for the step and return one result per scheduled sequence, in order. Called exactly once.

        Does not read the sequences: these have moved on. When it raises, nothing of the step is running any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """The handle of an executor that computes inside `launch`."""

    step_results: list[StepResult]

    def results(self) -> list[StepResult]:
        """Return the results."""
        return self.step_results


class Executor(Protocol):
    """Computes steps, in the order in which they are launched. Engine thread only."""

    kv: KvStore
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_name: str
    max_steps_in_flight: int
    """1: a step's tokens are known before the next one is launched. 2: step n + 1 is planned and launched while step n
    computes; then `ScheduledSequence.input_row` occurs."""

    def launch(self, batch: Seq[ScheduledSequence]) -> StepHandle:
        """Start one step: write KV of all new tokens, sample where asked. Does not mutate the sequences.

        Every sequence's block_table covers num_computed + num_new_tokens tokens. All that is needed of the sequences is
        read before this returns, and no view of a block_table outlives it (an exported array cannot grow). Results are
        taken in launch order. When it raises, nothing of the step is running, nor a block copy asked for before it.
        """
        ...
