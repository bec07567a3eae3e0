"""Sums over ranks through `torch.distributed`: for torch's own path, where no kernel is compiled.

    each rank's float32 sums ─ gathered by all ─ added up, from the first rank's to the last one's

So all ranks go on with the same bits. Their addresses, on the loopback device, stand in a memory file that only they
have.
"""

import os
import weakref
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from engine.weights.config import UnsupportedModel
from engine.weights.ranks import Rank

_ROWS_TOGETHER = 1024
_TIMEOUT = timedelta(minutes=10)


class RankLost(Exception):
    """A rank has ended: the engine's results are wrong from now on."""


class RankGroup:
    """One rank's way to the others. All of them call the same methods in the same order."""

    def __init__(self, rank: Rank, fd: int | None = None) -> None:
        """`fd`: the first rank's memory file, which is closed with this object; None: this is the first rank."""
        if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            raise UnsupportedModel(
                "cannot start several ranks: there are no compiled kernels, and this torch has no gloo",
                key="pools.*.tensor_parallel",
            )
        self.rank = rank
        self.fd = os.memfd_create("kvrelay-ranks", os.MFD_CLOEXEC) if fd is None else fd
        """Memory file by which the ranks find each other."""
        weakref.finalize(self, os.close, self.fd)
        self._gloo: Any = None

    def meet(self) -> None:
        """Wait for the other ranks, which call this, too. Raises RankLost."""
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - the group of `init_process_group` would be this process's only one
        options._timeout = _TIMEOUT  # noqa: SLF001
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        store = torch.distributed.FileStore(  # type: ignore[attr-defined]
            f"/proc/self/fd/{self.fd}", self.rank.size
        )
        try:
            self._gloo = gloo(store, self.rank.idx, self.rank.size, options)
        except RuntimeError as error:
            raise RankLost(f"cannot reach the other ranks: {error}") from error

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, equal in shape, [num_ranks, *part.shape]. Raises RankLost."""
        parts = part.new_empty((self.rank.size, *part.shape))
        try:
            self._gloo._allgather_base(parts, part.contiguous()[None]).wait()  # noqa: SLF001 - its only name
        except RuntimeError as error:
            raise RankLost(f"cannot go on: a rank process has ended: {error}") from error
        return parts

    def add_up(self, sums: Tensor) -> Tensor:
        """Return the sums of all ranks' tensors, float32 [num_rows, num_columns]. Mutates its own. Raises RankLost."""
        for begin in range(0, len(sums), _ROWS_TOGETHER):
            rows = sums[begin : begin + _ROWS_TOGETHER]
            first, *others = self.gather(rows)
            rows.copy_(first)
            for other in others:
                rows += other
        return sums
