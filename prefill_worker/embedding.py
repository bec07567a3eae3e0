"""Serves a Prefill call whose request asks for an embedding: no handoff, no lease, and nothing is kept at its end.

1. Leading blocks are pulled from the source, if the router names one, as for any prompt.
2. The engine computes the prompt in its ordinary steps, beside the prompts of generating requests.
3. The last message brings the pooled hidden states. The prompt's blocks stay in the prefix cache.

Closing the call cancels the request in the engine, in any state.
"""

import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc

from common.tracing import Stages
from common.wire import pack_floats
from engine.events import Embedded, EngineEvent, Failed, Started
from engine.interface import Engine
from engine.request import EngineRequest
from engine.steps.group import Group
from kvrelay.v1 import prefill_pb2 as pb
from kvrelay.v1 import sequence_pb2
from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


async def embed(
    runtime: WorkerRuntime,
    spec: EngineRequest,
    source: sequence_pb2.KvSource | None,
    entering: ExitStack,
    context: Context,
    stages: Stages,
) -> None:
    """Answer a call; closes `entering` once the engine has the request. Raises KvrelayError."""
    events: asyncio.Queue[EngineEvent] = asyncio.Queue()  # at most two entries
    with runtime.prefixes.arrival() as arrival:
        await runtime.prefixes.fetch(arrival, spec, source, stages)
        stages.enter("queue")
        group = await runtime.admit(lambda core: core.add(spec, events.put_nowait, arrival.landing))
    entering.close()
    try:
        await _follow(spec, events, context, stages)
    finally:
        runtime.engine.post(partial(cancel, group=group))


async def _follow(spec: EngineRequest, events: "asyncio.Queue[EngineEvent]", context: Context, stages: Stages) -> None:
    """Turn the engine's events into messages, up to the last. Raises the error of a failed step."""
    while True:
        match await events.get():
            case Started() as started:
                stages.enter("prefill", after_s=started.queue_s, num_cached_tokens=started.num_cached_tokens)
                await context.write(pb.PrefillResponse(started=started_to_proto(started)))
            case Embedded() as embedded:
                finished = pb.PrefillFinished(embedding=pack_floats(embedded.vector), prefill_s=embedded.prefill_s)
                await context.write(pb.PrefillResponse(finished=finished))
                logger.info("embedding done", extra={"request_id": spec.request_id, "prefill_s": embedded.prefill_s})
                return
            case Failed() as failed:
                raise failed.error


def cancel(core: Engine, group: Group) -> None:
    """Free everything that a request holds in the engine."""
    core.cancel(group)


def started_to_proto(started: Started, *, compile_s: float = 0.0) -> pb.PrefillStarted:
    """Return the message for the start of a computation."""
    return pb.PrefillStarted(
        num_cached_tokens=started.num_cached_tokens,
        queue_s=started.queue_s,
        num_pulled_tokens=started.num_pulled_tokens,
        compile_s=compile_s,
    )
