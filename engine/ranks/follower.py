"""Program of a rank other than the first: it follows the first one's steps until its pipe ends."""

import os
import pickle
import socket
import sys
from array import array
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch

from common.process import CannotStart
from engine.ops.select import load_cpu_kernels
from engine.options import ModelDescription
from engine.pages.kv_cache import TorchKvStore
from engine.ranks.decoder import RankPart, TorchRankPart
from engine.ranks.group import RankGroup
from engine.ranks.memory import RankMemory, map_memory
from engine.ranks.messages import FORWARD, LOGITS, PLAN, Start, read_plan


def begin(pipe_fd: int) -> tuple[socket.socket, Connection, Start]:
    """Return the ways to the first rank, and what it says first."""
    link, pipe = socket.socket(fileno=pipe_fd), Connection(os.dup(pipe_fd))
    start: Start = pickle.loads(receive(pipe))
    torch.set_num_threads(start.num_threads)
    return link, pipe, start


def receive(pipe: Connection) -> bytes:
    """Return the first rank's next message. Ends this process when there are no more."""
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError):
        sys.exit()


def main(pipe_fd: int, memory_fd: int) -> None:
    """Load the weights, map the pages, and compute.

    `memory_fd`: of `RankMemory`, where torch computes of `RankGroup`.
    """
    link, pipe, start = begin(pipe_fd)
    try:
        part, model = _load(start, memory_fd)
    except CannotStart as error:
        pipe.send_bytes(str(error).encode())
        return
    pipe.send_bytes(b"")
    num_blocks, num_window_pages = msgpack.unpackb(receive(pipe))
    _, (store_fd, *_), _, _ = socket.recv_fds(link, 1, 1)
    store = TorchKvStore(
        model.shape, num_blocks, device=model.device, num_window_pages=num_window_pages, memory=map_memory(store_fd)
    )
    if isinstance(part, TorchRankPart):
        part.group.meet()
    with torch.inference_mode():
        _follow(pipe, part.decoder(), part.ops(store), store)


def _load(start: Start, memory_fd: int) -> tuple[RankPart | TorchRankPart, ModelDescription]:
    options, rank = start.options, start.rank
    model = ModelDescription.read(options, may_have_window_pages=options.may_have_window_pages)
    if start.buffer_size is None:
        return TorchRankPart.load(model, RankGroup(rank, memory_fd)), model
    kernels = load_cpu_kernels(model.dtype)
    if kernels is None:
        raise CannotStart("cannot be a rank: there are no compiled kernels")
    memory = RankMemory(rank, kernels, map_memory(memory_fd), start.buffer_size)
    return RankPart.load(model, rank, kernels, memory), model


def _follow(pipe: Connection, decoder: Any, ops: Any, store: TorchKvStore) -> None:
    """Do what messages say."""
    step, hidden = None, torch.empty(0)
    while True:
        kind, *content = msgpack.unpackb(receive(pipe))
        match kind:
            case _ if kind == PLAN:
                spans, window_page_of = content
                if window_page_of:
                    store.window_page_of[:] = array("i", window_page_of)
                step = ops.plan(read_plan(spans, block_size=store.shape.block_size))
            case _ if kind == FORWARD:
                assert step is not None, "a step is planned before its tokens come"
                hidden = decoder.forward(torch.frombuffer(bytearray(content[0]), dtype=torch.int64), step)
            case _ if kind == LOGITS:
                num_rows, rows = content
                decoder.logits(torch.frombuffer(bytearray(rows), dtype=hidden.dtype).view(num_rows, -1))
