"""One rank's part of a decoder, for compiled kernels and for torch."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.loader import load_rank_weights
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import DepthParts, pack_projections
from engine.ops.cpu.ops import CpuDecoder, CpuOps, can_attend, can_run
from engine.ops.select import choose_cpu_kernels, packed_linears
from engine.ops.torch_attention import PageShare
from engine.ops.torch_ops import TorchOps
from engine.options import ModelDescription
from engine.pages.kv_cache import TorchKvStore
from engine.ranks.group import RankGroup
from engine.ranks.memory import RankMemory
from engine.ranks.products import cut_products
from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.decoder_weights import DecoderWeights, Linear, plain
from engine.weights.ranks import Rank
from engine.weights.segments import num_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """A rank's weights, kernels and shared memory; pages come later."""

    rank: Rank
    whole: DecoderConfig
    config: DecoderConfig
    """The rank's own part."""
    weights: DecoderWeights
    kernels: CpuKernels
    memory: RankMemory
    linears: str
    """Name of what computes products."""

    @classmethod
    def load(cls, model: ModelDescription, rank: Rank, kernels: CpuKernels, memory: RankMemory) -> "RankPart":
        """Read the rank's weights. Raises UnsupportedModel."""
        whole = model.config
        assert isinstance(whole, DecoderConfig), f"{whole} is no decoder of our own"
        weights = load_rank_weights(model.files, whole, rank, dtype=model.dtype, device=model.device)
        begin, end = (whole.vocab_size * idx // rank.size for idx in (rank.idx, rank.idx + 1))
        weights.head = Linear(weight=plain(weights.head).weight[begin:end], bias=None)
        depth = DepthParts(num_segments=num_segments(whole) // rank.size, ranks=ctypes.pointer(memory.struct))
        pack_projections(weights, kernels, depth)
        if not (can_attend(whole) and can_run(weights)):
            raise UnsupportedModel(
                f"cannot cut {model.info.name} among {rank.size} ranks: not all of its layers run on compiled kernels;"
                " set model.kernels: torch",
                key="pools.*.tensor_parallel",
            )
        config = rank.config(whole)
        return cls(
            rank=rank,
            whole=whole,
            config=config,
            weights=weights,
            kernels=kernels,
            memory=memory,
            linears=packed_linears(kernels, weights),
        )

    def ops(self, store: TorchKvStore) -> CpuOps:
        """Return the operations on the pages that all ranks share, each of which has some of their heads."""
        return CpuOps(self.config, store, self.kernels, first_page_head=self.rank.first_kv_head(self.whole))

    def decoder(self) -> "RankDecoder":
        """Return the rank's decoder."""
        return RankDecoder(self)


class RankDecoder(CpuDecoder):
    """A rank's part of a decoder. All ranks call the same methods in the same order, and wait for each other inside."""

    def __init__(self, part: RankPart) -> None:
        super().__init__(part.config, part.weights, part.kernels)
        self._part = part

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size], on the first rank; nothing that is right on the others."""
        part, num_rows, vocab_size = self._part, len(hidden), self._part.whole.vocab_size
        logits = torch.empty((num_rows if part.rank.idx == 0 else 0, vocab_size), dtype=torch.float32)
        self.kernels.gather_columns(
            ctypes.byref(self._head.address),
            ctypes.byref(part.memory.struct),
            hidden.data_ptr(),
            logits.data_ptr() if part.rank.idx == 0 else None,
            *(num_rows, vocab_size),
        )
        return logits if part.config.logits_divisor == 1 else logits.div_(part.config.logits_divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRankPart:
    """What a rank computes with in torch, before there are pages."""

    whole: DecoderConfig
    config: DecoderConfig
    """The rank's own part."""
    weights: DecoderWeights
    group: RankGroup
    linears: str
    """Name of what computes products."""

    @classmethod
    def load(cls, model: ModelDescription, group: RankGroup) -> "TorchRankPart":
        """Read the rank's weights. Raises UnsupportedModel."""
        whole = model.config
        assert isinstance(whole, DecoderConfig), f"{whole} is no decoder of our own"
        weights = load_rank_weights(model.files, whole, group.rank, dtype=model.dtype, device=model.device)
        cut_products(weights, group)
        linears = choose_cpu_kernels(weights, None).linears
        return cls(whole=whole, config=group.rank.config(whole), weights=weights, group=group, linears=linears)

    def ops(self, store: TorchKvStore) -> TorchOps:
        """Return the operations on the pages that all ranks share, each of which has some of their heads."""
        rank = self.group.rank
        first = rank.first_kv_head(self.whole)
        share = PageShare(heads=slice(first, first + self.config.num_kv_heads), clears_pages=rank.idx == 0)
        return TorchOps(self.config, store, self.weights.embedding.dtype, share=share)

    def decoder(self) -> Decoder:
        """Return the rank's decoder, whose products need `RankGroup.meet`."""
        return Decoder(self.config, self.weights)
