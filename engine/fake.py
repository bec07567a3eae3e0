"""A deterministic engine without torch, whose answers depend on every byte of KV that it reads.

KV of a token is 8 bytes: a hash of the token and its position. The next token is a hash over the KV *found in the
pages* of all earlier positions, through the block table. So a wrong page, a missed copy-on-write, a corrupt transfer
or an off-by-one slot changes the answer, exactly as in a real model. Scheduler, block pool and protocol are real.
"""

import time
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from common.ids import BlockId
from engine.executor import KvShape, KvStore, Logprobs, Sampled, ScheduledSequence, StepResult
from engine.noise import noise_key
from engine.sequence import Sequence
from engine.shared_memory import NONCE_BYTES, allocate_region

U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_LETTERS = b"etaoin shrdlu cmfwyp vbgkj qxz .\n"
_EOS_PER_1000 = 8


def fake_shape(block_size: int) -> KvShape:
    """Return the shape of the fake's blocks: 8 bytes a token."""
    return KvShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        block_size=block_size,
        dtype="uint8",
        bytes_per_element=1,
        fingerprint=f"fake-v1-{block_size}",
    )


class FakeKvStore:
    """Pages of the fake engine: uint64 [num_blocks, block_size] in shareable memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.shape = fake_shape(block_size)
        self.num_blocks = num_blocks
        memory, self.shared_region = allocate_region(num_blocks * self.shape.block_bytes)
        self._pages = self._view(memoryview(memory), num_blocks)

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes."""
        return memoryview(self._pages[list(block_ids)].tobytes())

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes."""
        self._pages[list(block_ids)] = np.frombuffer(data, dtype="<u8").reshape(len(block_ids), -1)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block."""
        self._pages[target] = self._pages[source]

    def map_peer(self, region: memoryview, num_blocks: int) -> "FakePeerPages":
        """Interpret another process's region as pages."""
        return FakePeerPages(self._view(region, num_blocks))

    def write_token(self, block_table: Seq[BlockId], position: int, value: int) -> None:
        """Store one token's KV."""
        size = self.shape.block_size
        self._pages[block_table[position // size], position % size] = value

    def gather(self, block_table: Seq[BlockId], num_tokens: int) -> U64:
        """Return the KV of the first tokens, uint64 [num_tokens]."""
        num_blocks = -(-num_tokens // self.shape.block_size)
        return self._pages[list(block_table[:num_blocks])].reshape(-1)[:num_tokens]

    def _view(self, region: memoryview, num_blocks: int) -> U64:
        pages = np.frombuffer(region[:-NONCE_BYTES], dtype="<u8")
        return pages.reshape(num_blocks, self.shape.block_size)


class FakePeerPages:
    """Another fake engine's pages, read-only."""

    def __init__(self, pages: U64) -> None:
        self._pages = pages

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes."""
        return memoryview(self._pages[list(block_ids)].tobytes())


class FakeExecutor:
    """Executor of the fake engine; a step takes `step_s` seconds of wall time."""

    def __init__(self, *, num_blocks: int, block_size: int, max_model_len: int = 4096, step_s: float = 0.0) -> None:
        self._store = FakeKvStore(num_blocks, block_size)
        self.kv: KvStore = self._store
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        self.model_name = "fake"
        self._step_s = step_s

    def execute(self, batch: Seq[ScheduledSequence]) -> list[StepResult]:
        """Write the KV of all new tokens and hash the pages for the next ones."""
        if self._step_s:
            time.sleep(self._step_s)
        return [self._one(item) for item in batch]

    def _one(self, item: ScheduledSequence) -> StepResult:
        sequence = item.sequence
        end = sequence.num_computed + item.num_new_tokens
        for position in range(sequence.num_computed, end):
            value = token_kv(sequence.token_ids[position], position)
            self._store.write_token(sequence.block_table, position, value)
        result = StepResult(sampled=[], prompt_logprobs=[])
        sampling = sequence.request.sampling
        if item.num_samples:
            state = context_state(self._store.gather(sequence.block_table, end))
            result.sampled = [self._sample(sequence, state, j) for j in range(item.num_samples)]
        if sampling.num_prompt_logprobs is not None:
            for position in range(sequence.num_computed, min(end, sequence.num_prompt_tokens - 1)):
                state = context_state(self._store.gather(sequence.block_table, position + 1))
                target = sequence.token_ids[position + 1]
                result.prompt_logprobs.append(_logprobs(state, target, sampling.num_prompt_logprobs))
        return result

    def _sample(self, sequence: Sequence, state: int, sample: int) -> Sampled:
        sampling = sequence.request.sampling
        index = sequence.num_output_tokens
        if not sampling.is_greedy:
            state = _mix(state ^ noise_key(sampling.seed, sequence.sample_index + sample, index))
        token_id = _LETTERS[state % len(_LETTERS)]
        if (state >> 20) % 1000 < _EOS_PER_1000 and not sampling.ignore_eos and index >= sampling.min_tokens:
            token_id = EOS_TOKEN_ID
        if sampling.num_logprobs is None:
            return Sampled(token_id=token_id)
        return Sampled(token_id=token_id, logprobs=_logprobs(state, token_id, sampling.num_logprobs))


def token_kv(token_id: int, position: int) -> int:
    """Return the 64-bit KV of a token at a position."""
    return _mix(token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1)


def context_state(kv: U64) -> int:
    """Return a 64-bit state that depends on every value and its place."""
    weights = (np.arange(len(kv), dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (kv ^ (kv >> np.uint64(29))) * (weights | np.uint64(1))
    return _mix(int(mixed.sum(dtype=np.uint64)))


def _logprobs(state: int, token_id: int, num_top: int) -> Logprobs:
    """Return made-up but deterministic log-probabilities that follow the pages' content."""
    top = tuple((int(_mix(state + rank) % VOCAB_SIZE), -1.0 - rank - (state % 997) / 997) for rank in range(num_top))
    return Logprobs(token_id=token_id, logprob=-0.5 - (state % 997) / 997, top=top)


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
