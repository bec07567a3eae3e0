"""A prefix that requests share, and workers that pull it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.request import EngineRequest
from kvrelay.v1 import sequence_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.worker.cluster import Pool, running_pool
from worker.prefix_pull import PullOutcome
from worker.serving import RunningWorker

OTHERS: dict[str, dict[str, Any]] = {"prefill-0": {}, "prefill-1": {}, "decode-0": {}}
PREFIX = [i * 7 % 251 for i in range(40)]
PREFIX_BLOCKS = len(PREFIX) // BLOCK_SIZE


def prompt(tail: int, **sampling: Any) -> EngineRequest:
    """Return a request for the shared prefix and a tail of its own."""
    return make_request([*PREFIX, *([tail] * 7)], ignore_eos=True, **sampling)


def where(worker: RunningWorker, num_blocks: int = PREFIX_BLOCKS, **changes: Any) -> sequence_pb2.KvSource:
    """Return the message that names a worker as a source."""
    fields: dict[str, Any] = {
        "worker_id": worker.runtime.worker_id,
        "address": worker.kv_address,
        "epoch": worker.runtime.epoch,
    }
    return sequence_pb2.KvSource(**(fields | {"num_blocks": num_blocks} | changes))


def outcomes(worker: RunningWorker) -> dict[PullOutcome, int]:
    return dict(worker.runtime.prefixes.outcomes)


@asynccontextmanager
async def warm_pool(*, transports: tuple[str, ...] = ("grpc",), **fakes: dict[str, Any]) -> AsyncIterator[Pool]:
    """Start two prefill workers and a decode worker; prefill-0 has the prefix in its cache."""
    named = {name: fakes.get(name.replace("-", "_"), {}) for name in OTHERS}
    async with running_pool(named, transports=transports) as pool:
        await pool.pair("prefill-0", "decode-0").generate(prompt(1, max_tokens=1))
        yield pool
