"""One model on several cards of a host: each is a rank, a process with a part of the weights and of every page.

    first rank    plans · sends · launches · samples ─┐  sums and logits: NCCL, inside the graphs
    other ranks            launch the same           ─┘

The first rank's tokens are broadcast among the cards, so that it goes on without knowing them. A page of a rank has its
own heads; for everything else the heads of all ranks lie side by side, as in the pages of one rank.
"""

import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.ids import BlockId
from engine.cuda.buffers import DecodeColumns, RaggedColumns, SentStep
from engine.cuda.executor import CudaExecutor
from engine.cuda.loading import (
    ExecutorT,
    LoadedModel,
    StepBounds,
    check_weights_fit,
    make_cuda_executor,
    measure_kv_bytes,
)
from engine.device.columns import PackedColumns
from engine.device.devices import device_for
from engine.device.memory import device_free_bytes
from engine.kv_store import DeviceSharing, HostRing, KvShape, SharedRegion, check_ids
from engine.model.decoder import Decoder
from engine.model.floors import measure_floors
from engine.model.loader import load_rank_weights
from engine.ops.interface import StepOps
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import HostPages, TorchKvStore
from engine.ranks.group import DeviceGroup
from engine.ranks.leader import Followers, end_without
from engine.ranks.products import cut_products
from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.decoder_weights import DecoderWeights
from engine.weights.ranks import Rank


def load_ranks(model: ModelDescription, options: EngineOptions) -> CudaExecutor:
    """Return the executor of the first of several ranks. Raises UnsupportedModel."""
    config, rank = model.config, Rank(idx=0, size=options.tensor_parallel)
    assert isinstance(config, DecoderConfig), f"{config} is no decoder of our own"
    rank.config(config)  # raises what can be refused before anything is started
    if options.kv_dtype == "fp8":
        raise UnsupportedModel(
            "cannot cut pages of fp8 among ranks: each would have scales of its own", key="model.kv_dtype"
        )
    if model.device.type == "cuda" and (num_cards := torch.cuda.device_count()) < rank.size:
        raise UnsupportedModel(
            f"cannot start {rank.size} ranks: each has a GPU of its own, and this worker sees {num_cards}; set"
            f" pools.*.num_gpus: {rank.size}",
            key="pools.*.tensor_parallel",
        )
    group = DeviceGroup(rank, model.device)
    followers = Followers(options, group.fd, module="engine.cuda.follower")
    try:
        part = load_part(model, options, group)
        followers.await_loaded()
        followers.watch(end_without)
        executor = make_executor(part, model.shape, options, group, CudaExecutor)
    except BaseException:
        followers.close()
        raise
    weakref.finalize(executor, followers.close)
    executor.announce = followers.post
    assert isinstance(executor.kv, TorchKvStore), f"{executor.kv} holds no tensors"
    executor.kv = JoinedKvStore(model.shape, executor.kv, followers, rank.size)
    return executor


def load_part(model: ModelDescription, options: EngineOptions, group: DeviceGroup) -> LoadedModel:
    """Return a rank's part of a model, on its card. Raises UnsupportedModel."""
    whole, rank, device = model.config, group.rank, model.device
    assert isinstance(whole, DecoderConfig), f"{whole} is no decoder of our own"
    if device.type == "cuda":
        torch.cuda.set_device(rank.idx)
    free_bytes = device_free_bytes(device_for(device).memory(), options.memory_share)
    check_weights_fit(model, None, free_bytes * rank.size)
    weights = load_rank_weights(model.files, whole, rank, dtype=model.dtype, device=device, stacks_experts=True)
    cut_products(weights, group)
    config = rank.config(whole)
    shape = replace(model.shape, num_kv_heads=config.num_kv_heads)
    return LoadedModel(
        decoder=_RankDecoder(config, weights, group),
        info=model.info,
        shape=shape,
        device=device,
        dtype=model.dtype,
        floors=measure_floors(config, shape, weight_bytes=weights.num_bytes, dtype=model.dtype, device=device),
        uses_cudnn=options.kernels == "cudnn",
    )


def make_executor(
    part: LoadedModel, shape: KvShape, options: EngineOptions, group: DeviceGroup, kind: type[ExecutorT]
) -> ExecutorT:
    """Return an executor with as many pages as all ranks have room for; all of them call this at the same time.

    `shape`: that of whole pages.
    """
    bounds = StepBounds(max_step_tokens=options.max_step_tokens, max_running=options.max_running)
    ratio = shape.num_kv_heads / part.shape.num_kv_heads
    group.meet()
    num_blocks = options.num_pages(shape, lambda: int(measure_kv_bytes(part, bounds, options.memory_share) * ratio))
    counts = group.gather(torch.tensor([num_blocks], device=part.device))
    return make_cuda_executor(part, int(counts.min()), bounds, kind)


class _RankDecoder(Decoder):
    """A rank's part of a decoder, which takes the first rank's tokens."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, group: DeviceGroup) -> None:
        super().__init__(config, weights)
        self._group = group

    def forward(self, token_ids: Tensor, ops: StepOps) -> Tensor:
        """See `Decoder`. Mutates token_ids in ranks other than the first."""
        return super().forward(self._group.broadcast(token_ids), ops)


class FollowingExecutor(CudaExecutor):
    """Executor of a rank other than the first."""

    @torch.inference_mode()
    def follow(self, sent: SentStep) -> None:
        """Launch what the first rank launches, up to its logits."""
        columns = PackedColumns()
        columns.ints(sent.words)
        match sent.step:
            case DecodeColumns() as step:
                words = self._decode.upload(step, columns)
                self._tables.apply(sent.update, words)
                self._decode.run(step)
            case RaggedColumns() as step:
                words = columns.upload(self._device)
                self._tables.apply(sent.update, words)
                token_ids = step.input_ids(words, self._decode.last_sampled)
                hidden = self._model.forward(token_ids, self._ops.bind(step.on_device(words, self._tables.tables)))
                for rows in sent.logits:
                    own = hidden[rows] if isinstance(rows, slice) else hidden.index_select(0, rows.of(words))
                    self._model.logits(own)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """What a rank does with blocks of its own."""

    block_ids: tuple[BlockId, ...]
    data: bytes | None = None
    """New content of the blocks; None: the content is wanted."""
    target: BlockId | None = None
    """Block over which the only one is copied, in order with the steps."""


class JoinedKvStore:
    """The pages of all ranks as those of one; a `KvStore` whose bytes go through host memory."""

    def __init__(self, shape: KvShape, store: TorchKvStore, followers: Followers, num_ranks: int) -> None:
        """Take the shape of whole pages, and the first rank's own."""
        self.shape = shape
        self.num_blocks = store.num_blocks
        self.shared_region: SharedRegion | None = None
        self.device_sharing: DeviceSharing | None = None
        self.host_ring: HostRing | None = None
        self._store = store
        self._followers = followers
        count = store.shape.num_kv_heads
        firsts = [Rank(idx=idx, size=num_ranks).first_head_of(shape.num_kv_heads) for idx in range(num_ranks)]
        self._heads = [slice(first, first + count) for first in firsts]

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `KvStore`. Raises LayoutMismatch, RankLost."""
        check_ids(block_ids, self.num_blocks)
        order = BlockOrder(block_ids=tuple(block_ids))
        replies = self._followers.ask([order] * (len(self._heads) - 1))
        blocks = np.empty(len(block_ids) * self.shape.block_bytes, dtype=np.uint8)
        parts: list[memoryview | bytes] = [self._store.read_blocks(block_ids), *replies]
        for heads, part in zip(self._heads, parts, strict=True):
            own = self._rows(blocks)[:, :, heads]
            own[:] = np.frombuffer(part, dtype=np.uint8).reshape(own.shape)
        return blocks.data

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `KvStore`. Raises LayoutMismatch, RankLost."""
        check_ids(block_ids, self.num_blocks)
        self.shape.check_data(data, len(block_ids))
        rows = self._rows(np.frombuffer(data, dtype=np.uint8))
        mine, *others = (rows[:, :, heads].tobytes() for heads in self._heads)
        self._followers.ask([BlockOrder(block_ids=tuple(block_ids), data=each) for each in others])
        self._store.write_blocks(block_ids, memoryview(mine))

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """See `KvStore`. Raises RankLost."""
        self._followers.post(BlockOrder(block_ids=(source,), target=target))
        self._store.copy_block(source, target)

    def map_peer(self, region: memoryview, num_blocks: int) -> HostPages:
        """See `KvStore`."""
        return HostPages(region, num_blocks, self.shape)

    def _rows(self, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a view of blocks' bytes, [parts of all blocks, groups of tokens, num_kv_heads, bytes of each]."""
        shape, size = self.shape, self._store.kv_format.group_size
        return blocks.reshape(-1, shape.block_size // size, shape.num_kv_heads, size * shape.row_bytes)
