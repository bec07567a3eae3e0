"""The first rank: it has the engine, and the other ranks follow its steps.

The pages are one store, in memory that all ranks have mapped: each reads and writes those heads of a page that it has.
So pages are handed over, cached and copied as with one rank, by the first rank alone.
"""

import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch
from torch import Tensor

from common.process import PARENT_PID_ENV, CannotStart, describe_exit
from engine.model.decoder import Decoder
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.ops import CpuOps, CpuStepOps
from engine.ops.interface import StepOps
from engine.ops.metadata import AttentionMetadata
from engine.ops.select import log_kernels
from engine.ops.torch_ops import TorchOps
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore
from engine.ranks.decoder import RankDecoder, RankPart, TorchRankPart
from engine.ranks.group import RankGroup, RankLost
from engine.ranks.memory import RankMemory, allocate_memory, buffer_size
from engine.ranks.messages import Start, pack_forward, pack_logits, pack_plan
from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.ranks import Rank

logger = logging.getLogger(__name__)

_EXIT_LOST = 70  # sysexits.h: internal software error
_CLOSE_TIMEOUT_S = 10.0
LOAD_S, LOAD_FACTOR = 120.0, 5.0
"""Seconds that the others have once the first rank has its weights, or so many times what it took if that is more."""


def end_without(loss: str) -> None:
    """End this process: it has lost a rank, and what it computes is wrong."""
    logger.critical("%s; this worker ends, too", loss)
    os._exit(_EXIT_LOST)


@contextmanager
def _together() -> Iterator[None]:
    """Raise RankLost for any error: the other ranks wait inside of a step that this one has left."""
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        raise RankLost(f"cannot go on: a step has failed in one of several ranks: {error}") from error


class Followers:
    """The processes of all ranks but the first."""

    def __init__(
        self,
        options: EngineOptions,
        memory_fd: int,
        num_floats: int | None = None,
        *,
        module: str = "engine.ranks.follower",
    ) -> None:
        """Start them; they load their weights while the first rank does.

        `num_floats`: see `Start.buffer_size`. `module`: their program (`engine.ranks.__main__`).
        """
        self._started_s = time.monotonic()
        self._sockets: list[socket.socket] = []
        self._pipes: list[Connection] = []
        self._sending, self._asking = threading.Lock(), threading.Lock()
        self._is_closed = threading.Event()
        self._lost: Future[str] = Future()
        started: Future[list[subprocess.Popen[bytes]]] = Future()
        with ExitStack() as given:
            commands: list[list[str]] = []
            for idx in range(1, options.tensor_parallel):
                start = Start(
                    rank=Rank(idx=idx, size=options.tensor_parallel),
                    options=options,
                    num_threads=torch.get_num_threads(),
                    buffer_size=num_floats,
                )
                ours, theirs = socket.socketpair()
                given.enter_context(theirs)
                self._sockets.append(ours)
                self._pipes.append(Connection(os.dup(ours.fileno())))
                self._pipes[-1].send(start)
                program = [sys.executable, "-P", "-m", "engine.ranks", module]
                commands.append([*program, str(theirs.fileno()), str(memory_fd)])
            threading.Thread(target=self._live, args=(commands, started), name="ranks", daemon=True).start()
            self._processes = started.result()

    def _live(self, commands: Seq[Seq[str]], started: "Future[list[subprocess.Popen[bytes]]]") -> None:
        """Start the processes, and wait for one to end. The system kills them, stopped ones, too, with this thread."""
        environment = {**os.environ, PARENT_PID_ENV: str(os.getpid())}
        processes: list[subprocess.Popen[bytes]] = []
        ends, ended = dict[int, int](), select.poll()
        try:
            for command in commands:
                fds = [int(fd) for fd in command[-2:]]
                # A rank that kept the worker's output open would hold up whoever reads it to its end.
                processes.append(
                    subprocess.Popen(
                        command,
                        pass_fds=fds,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env=environment,
                    )
                )
            for idx, process in enumerate(processes):
                ends[os.pidfd_open(process.pid)] = idx
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            for process in processes:
                process.kill()
                process.wait()
            started.set_exception(error)
            return
        for fd in ends:
            ended.register(fd, select.POLLIN)
        started.set_result(processes)
        first = ends[ended.poll()[0][0]]
        if not self._is_closed.is_set():
            end = describe_exit(processes[first].wait())
            self._lost.set_result(f"rank {first + 1} (process {processes[first].pid}) has ended: {end}")
        for fd in ends:
            os.close(fd)

    def await_loaded(self) -> None:
        """Wait until every rank has its weights; the first one has its own.

        Raises UnsupportedModel for one that cannot load them, CannotStart for one that ends meanwhile, or takes far
        longer than the first.
        """
        complaints, has_ended = list[str](), False
        begun_s = time.monotonic()
        limit_s = max(LOAD_S, LOAD_FACTOR * (begun_s - self._started_s))
        for idx, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), 1):
            if not pipe.poll(max(0.0, begun_s + limit_s - time.monotonic())):
                raise CannotStart(
                    f"cannot start the ranks: rank {idx} (process {process.pid}) has no weights {limit_s:.0f} s after"
                    " the first one; look whether it is stopped, or waits for its disk"
                )
            try:
                complaints.append(pipe.recv_bytes().decode())
            except (EOFError, ConnectionError):
                has_ended = True
        for complaint in filter(None, complaints):
            raise UnsupportedModel(complaint)
        if has_ended:  # with one of them the system kills the others
            raise CannotStart(f"cannot start the ranks: {self._lost.result()}, while it loaded its weights")

    def share(self, store: TorchKvStore) -> None:
        """Let every rank map the pages."""
        assert store.shared_region is not None, "ranks share memory, so pages can be shared, too"
        for pipe, each in zip(self._pipes, self._sockets, strict=True):
            pipe.send_bytes(msgpack.packb((store.num_blocks, store.num_window_pages)))
            socket.send_fds(each, [b"\0"], [store.shared_region.fd])

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost`, on any thread, when a rank ends by itself, or has done so: with which one, and how."""
        self._lost.add_done_callback(lambda lost: on_lost(lost.result()))

    def send(self, message: bytes) -> None:
        """Send every rank a message. Any thread. Raises RankLost."""
        self._send([message] * len(self._pipes))

    def post(self, value: Any) -> None:
        """Send every rank a value, pickled. Any thread. Raises RankLost."""
        self.send(pickle.dumps(value))

    def ask(self, values: Seq[Any]) -> list[bytes]:
        """Send each rank a value of its own, and return the replies. Any thread. Raises RankLost."""
        with self._asking:
            self._send([*map(pickle.dumps, values)])
            try:
                return [pipe.recv_bytes() for pipe in self._pipes]
            except (EOFError, OSError) as error:
                raise RankLost("cannot go on: a rank process has ended") from error

    def _send(self, messages: Seq[bytes]) -> None:
        try:
            with self._sending:
                for pipe, message in zip(self._pipes, messages, strict=True):
                    pipe.send_bytes(message)
        except OSError as error:
            raise RankLost("cannot go on: a rank process has ended") from error

    def close(self) -> None:
        """End the processes, which end when their pipe does."""
        self._is_closed.set()
        for pipe, each in zip(self._pipes, self._sockets, strict=True):
            pipe.close()
            each.close()
        for process in self._processes:
            try:
                process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class LeadingOps:
    """Operations whose steps the other ranks plan, too."""

    def __init__(self, ops: CpuOps | TorchOps, followers: Followers, store: TorchKvStore) -> None:
        self.name = ops.name
        self._ops = ops
        self._followers = followers
        self._window_page_of = store.window_page_of if store.shape.window_layers else array("i")

    def plan(self, metadata: AttentionMetadata) -> Any:
        """See `Ops`."""
        self._followers.send(pack_plan(metadata, self._window_page_of))
        return self._ops.plan(metadata)


class LeadingDecoder(RankDecoder):
    """The first rank's part of a decoder, whose calls the other ranks follow."""

    def __init__(self, part: RankPart, followers: Followers) -> None:
        super().__init__(part)
        self._followers = followers
        weakref.finalize(self, followers.close)

    def forward_tapped(self, token_ids: Tensor, step: CpuStepOps, layers: Seq[int]) -> tuple[Tensor, list[Tensor]]:
        """See `CpuDecoder`. Raises RankLost."""
        self._followers.send(pack_forward(token_ids))
        with _together():
            found = super().forward_tapped(token_ids, step, layers)
        self._check()
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CpuDecoder`. Raises RankLost."""
        hidden = hidden.contiguous()
        self._followers.send(pack_logits(hidden))
        with _together():
            logits = super().logits(hidden)
        self._check()
        return logits

    def _check(self) -> None:
        if self._part.memory.is_aborted:
            raise RankLost("cannot go on: a rank process has ended")


class LeadingTorchDecoder(Decoder):
    """`LeadingDecoder` where torch computes."""

    def __init__(self, part: TorchRankPart, followers: Followers) -> None:
        super().__init__(part.config, part.weights)
        self._followers = followers
        weakref.finalize(self, followers.close)

    def forward(self, token_ids: Tensor, ops: StepOps) -> Tensor:
        """See `Decoder`. Raises RankLost."""
        self._followers.send(pack_forward(token_ids))
        with _together():
            return super().forward(token_ids, ops)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`. Raises RankLost."""
        hidden = hidden.contiguous()
        self._followers.send(pack_logits(hidden))
        with _together():
            return super().logits(hidden)


class LeadingRank:
    """The first rank while the model is loaded."""

    def __init__(self, model: ModelDescription, options: EngineOptions, kernels: CpuKernels | None) -> None:
        """Start the other ranks, and load all weights. Without kernels torch computes. Raises UnsupportedModel."""
        config, rank = model.config, Rank(idx=0, size=options.tensor_parallel)
        assert isinstance(config, DecoderConfig), f"{config} is no decoder of our own"
        rank.config(config)  # raises what can be refused before anything is started
        load: Callable[[], RankPart | TorchRankPart]
        if kernels is None:
            group, num_floats = RankGroup(rank), None
            fd, load = group.fd, partial(TorchRankPart.load, model, group)
        else:
            num_floats = buffer_size(config)
            memory, fd = allocate_memory(kernels, num_floats)
            load = partial(RankPart.load, model, rank, kernels, RankMemory(rank, kernels, memory, num_floats))
        torch.set_num_threads(max(1, torch.get_num_threads() // rank.size))
        self._followers = Followers(replace(options, device="cpu"), fd, num_floats)
        try:
            self.part = load()
            self._followers.await_loaded()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the other ranks."""
        self._followers.close()

    def bind(
        self, store: TorchKvStore, on_lost: Callable[[str], None] | None = None
    ) -> tuple[LeadingDecoder | LeadingTorchDecoder, LeadingOps]:
        """Let all ranks compute on these pages. `on_lost`: see `Followers.watch`; None: `end_without`."""
        part, followers = self.part, self._followers

        memory = part.memory if isinstance(part, RankPart) else None

        def lost(loss: str) -> None:
            if memory is not None:
                memory.abort()
            (on_lost or end_without)(loss)

        followers.share(store)
        followers.watch(lost)
        own = part.ops(store)
        log_kernels(own, part.linears)
        ops = LeadingOps(own, followers, store)
        if isinstance(part, RankPart):
            return LeadingDecoder(part, followers), ops
        part.group.meet()
        return LeadingTorchDecoder(part, followers), ops
