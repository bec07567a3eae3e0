"""Sums over ranks through `torch.distributed`: for torch's own path, where no kernel is compiled.

    each rank's float32 sums ─ gathered by all ─ added up, from the first rank's to the last one's

So all ranks go on with the same bits. Their addresses, on the loopback device, stand in a memory file that only they
have.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from engine.executor import DeviceBroken
from engine.weights.config import UnsupportedModel
from engine.weights.ranks import Rank

_ROWS_TOGETHER = 1024
_TIMEOUT = timedelta(minutes=10)


class RankLost(DeviceBroken):
    """A rank has ended, or is not where the others are: the engine's results are wrong from now on."""


class RankGroup:
    """One rank's way to the others. All of them call the same methods in the same order."""

    def __init__(self, rank: Rank, fd: int | None = None) -> None:
        """`fd`: the first rank's memory file, for as long as the process lives; None: this is the first rank."""
        if not (torch.distributed.is_available() and hasattr(os, "memfd_create")):
            raise UnsupportedModel(
                "cannot start several ranks: this system has no memory files (memfd), or this torch no process groups",
                key="pools.*.tensor_parallel",
            )
        self.rank = rank
        self.fd = os.memfd_create("kvrelay-ranks", os.MFD_CLOEXEC) if fd is None else fd
        """Memory file by which the ranks find each other.

        Never closed: torch's store opens this number again when it is collected, and appends a record. That may be long
        after this object, since the backend or a traceback can hold the store; a closed number would by then be that of
        another file.
        """
        self._backend: Any = None

    def meet(self) -> None:
        """Wait for the other ranks, which call this, too. Raises RankLost."""
        store = torch.distributed.FileStore(  # type: ignore[attr-defined]
            f"/proc/self/fd/{self.fd}", self.rank.size
        )
        try:
            # Not the group of `init_process_group`, of which a process has one.
            self._backend = self._join(store, self.rank.idx, self.rank.size)
        except RuntimeError as error:
            raise RankLost(f"cannot reach the other ranks: {error}") from error

    def _join(self, *args: Any) -> Any:
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - its only name, as below
        options._timeout = _TIMEOUT  # noqa: SLF001
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        return gloo(*args, options)

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, equal in shape, [num_ranks, *part.shape]. Raises RankLost."""
        parts = part.new_empty((self.rank.size, *part.shape))
        self._run("_allgather_base", parts, part.contiguous()[None])
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

    def _run(self, name: str, *tensors: Any) -> None:
        try:
            getattr(self._backend, name)(*tensors).wait()
        except RuntimeError as error:
            raise RankLost(f"cannot go on: a rank process has ended: {error}") from error


class DeviceGroup(RankGroup):
    """Ranks on cards: NCCL adds up in an order of its own, which is one for all ranks. CUDA graphs capture its work.

    Tensors of a CPU take gloo, by the same calls.
    """

    def __init__(self, rank: Rank, device: torch.device, fd: int | None = None) -> None:
        super().__init__(rank, fd)
        self._device = device

    def _join(self, *args: Any) -> Any:
        if self._device.type != "cuda":
            return super()._join(*args)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _TIMEOUT  # noqa: SLF001 - its only name
        return nccl(*args, options)

    def add_up(self, sums: Tensor) -> Tensor:
        """See `RankGroup`."""
        self._run("allreduce", [sums])
        return sums

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor by that of the first rank, and return it. Raises RankLost."""
        self._run("broadcast", [tensor])
        return tensor
