"""An executor that computes nothing: its pages have no bytes, and the workload names the generated tokens.

Its pages pretend to be in the memory of one device that all workers share, so the real transfer code moves page ids and
no bytes; the network takes the time of the bytes.
"""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import gcd

from common.ids import BlockId, RequestId
from engine.executor import DoneStep, Sampled, ScheduledSequence, StepResult
from engine.kv_store import (
    STATE_ITEM_BYTES,
    DevicePeerPages,
    DeviceRegion,
    DeviceSharing,
    HostRing,
    KvShape,
    KvStore,
    PeerPages,
    SharedRegion,
    WindowedLayers,
)
from engine.sequence import Sequence
from engine.work import StepFloors
from measure.simulate.timing import WindowPageSize

VOCAB_SIZE = 1 << 31
EOS_TOKEN_ID = VOCAB_SIZE - 1
FILLER_TOKEN_ID = VOCAB_SIZE - 2
"""Token of answers that the workload does not spell out."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Answer of the model to one request."""

    num_tokens: int
    tokens: "array[int] | None"

    def token(self, index: int) -> int:
        """Return the token at an index; the last one ends the answer."""
        if index >= self.num_tokens - 1:
            return EOS_TOKEN_ID
        return FILLER_TOKEN_ID if self.tokens is None else self.tokens[index]

    def run(self, start: int, stop: int) -> "array[int]":
        """Return the tokens [start, stop)."""
        num_plain = max(0, min(stop, self.num_tokens - 1) - start)
        if self.tokens is None:
            plain = array("I", (FILLER_TOKEN_ID,)) * num_plain
        else:
            plain = self.tokens[start : start + num_plain]
        return plain + array("I", (EOS_TOKEN_ID,)) * (stop - start - num_plain)


Answers = Mapping[RequestId, KnownAnswer]
"""Answers of the running requests."""


def sim_shape(*, block_size: int, block_bytes: int, windows: WindowPageSize | None = None) -> KvShape:
    """Return the shape of a simulated block. Raises ValueError unless every token has the same number of bytes."""
    if block_bytes <= 0 or block_bytes % block_size:
        raise ValueError(f"a block of {block_size} tokens has {block_bytes} bytes; must be a multiple of {block_size}")
    layer_bytes, windowed = block_bytes, None
    if windows is not None and windows.num_tokens == 1:
        windowed = WindowedLayers(layers=(1,), num_tokens=1, state_size=windows.page_bytes // STATE_ITEM_BYTES)
    elif windows is not None:
        layer_bytes = gcd(block_bytes, windows.page_bytes)
        first, end = block_bytes // layer_bytes, (block_bytes + windows.page_bytes) // layer_bytes
        layers = tuple(range(first, end))
        windowed = WindowedLayers(layers=layers, num_tokens=windows.num_tokens, is_chunk=windows.is_chunk)
        if layer_bytes % block_size:
            raise ValueError(f"window pages have {windows.page_bytes} bytes; must be a multiple of {block_size}")
    return KvShape(
        num_layers=block_bytes // layer_bytes + (0 if windowed is None else len(windowed.layers)),
        num_kv_heads=1,
        head_dim=layer_bytes // block_size,
        block_size=block_size,
        dtype="uint8",
        row_bytes=layer_bytes // block_size,
        fingerprint=f"simulated-{block_size}-{block_bytes}",
        parts_per_layer=1,
        windowed=windowed,
    )


class SimKvStore:
    """Pages without bytes."""

    def __init__(self, shape: KvShape, num_blocks: int, num_window_pages: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_window_pages = num_window_pages
        self.window_page_of = array("i", [-1]) * num_blocks
        self.shared_region: SharedRegion | None = None
        self.device_sharing: DeviceSharing | None = _Sharing()
        self.host_ring: HostRing | None = None

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Raise: there are no bytes."""
        raise NotImplementedError("simulated pages have no bytes")

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Raise, likewise."""
        raise NotImplementedError("simulated pages have no bytes")

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Do nothing."""

    def map_peer(self, region: memoryview, num_blocks: int) -> PeerPages:
        """Raise: the pages are not in host memory."""
        raise NotImplementedError("simulated pages have no bytes")


class _Sharing:
    """The device that holds all simulated pages."""

    def __init__(self) -> None:
        self.region = DeviceRegion(
            handle=b"simulated", offset_bytes=0, size_bytes=0, device_uuid="simulated", nonce=b""
        )
        self.readable_devices: tuple[str, ...] = ("simulated",)

    def map_peer(self, region: DeviceRegion, num_blocks: int) -> DevicePeerPages:
        return _PeerPages()


class _PeerPages:
    """Another worker's pages. Copying them takes no time."""

    def copy_blocks(self, sources: Seq[int], targets: Seq[BlockId]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SimExecutor:
    """Returns the workload's tokens at once; `measure.simulate.engine` lets the time pass."""

    def __init__(
        self, *, shape: KvShape, num_blocks: int, max_model_len: int, answers: Answers, num_window_pages: int = 0
    ) -> None:
        self.kv: KvStore = SimKvStore(shape, num_blocks, num_window_pages)
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.hidden_size = 0
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        self.model_name = "simulated"
        self.max_steps_in_flight = 1
        self.verifies_drafts = False
        self.compiles_steps = False
        self.exact_resume = True
        self.floors: StepFloors | None = None
        self._answers = answers

    def answer(self, sequence: Sequence) -> KnownAnswer:
        """Return the answer to a request; an unknown one goes on to its limit."""
        known = self._answers.get(sequence.request.request_id)
        return known if known is not None else KnownAnswer(sequence.request.sampling.max_tokens, None)

    def launch(self, batch: Seq[ScheduledSequence]) -> DoneStep:
        """Return the tokens."""
        return DoneStep([self._result(item) for item in batch])

    def _result(self, item: ScheduledSequence) -> StepResult:
        if item.num_samples == 0:
            return StepResult(sampled=[], prompt_logprobs=[])
        token_id = self.answer(item.sequence).token(item.token_index)
        return StepResult(sampled=[Sampled(token_id=token_id)] * item.num_samples, prompt_logprobs=[])
