"""Program of a rank on a card of its own, other than the first: it launches the steps of that until its pipe ends."""

import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from common.process import CannotStart
from engine.cuda.buffers import SentStep
from engine.cuda.ranks import BlockOrder, FollowingExecutor, load_part, make_executor
from engine.kv_store import KvStore
from engine.options import ModelDescription
from engine.ranks.follower import begin, receive
from engine.ranks.group import DeviceGroup

logger = logging.getLogger(__name__)

_EXIT_BROKEN = 70  # sysexits.h: internal software error


def main(pipe_fd: int, memory_fd: int) -> None:
    """Load the weights, and compute."""
    _, pipe, start = begin(pipe_fd)
    try:
        model = ModelDescription.read(start.options)
        group = DeviceGroup(start.rank, model.device, memory_fd)
        part = load_part(model, start.options, group)
    except CannotStart as error:
        pipe.send_bytes(str(error).encode())
        return
    pipe.send_bytes(b"")
    executor = make_executor(part, model.shape, start.options, group, FollowingExecutor)
    with ThreadPoolExecutor(1, thread_name_prefix="pages") as pages:
        while True:
            match pickle.loads(receive(pipe)):
                case SentStep() as step:
                    executor.follow(step)
                case BlockOrder(block_ids=(source,), target=target) if target is not None:
                    executor.kv.copy_block(source, target)
                case BlockOrder() as order:
                    pages.submit(_serve, order, executor.kv, pipe)


def _serve(order: BlockOrder, store: KvStore, pipe: Connection) -> None:
    """Read or write blocks, and reply."""
    try:
        if order.data is None:
            pipe.send_bytes(store.read_blocks(order.block_ids))
        else:
            store.write_blocks(order.block_ids, memoryview(order.data))
            pipe.send_bytes(b"")
    except OSError:
        return  # the first rank has ended
    except BaseException:
        logger.exception("cannot go on without pages")
        os._exit(_EXIT_BROKEN)
