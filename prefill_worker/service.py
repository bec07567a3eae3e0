"""PrefillService: computes a prompt's KV under a handoff.

1. The router's Prefill call starts the handoff; the decode worker's fetch may be waiting for it. If the router names a
   source, leading blocks are pulled from its cache first.
2. The engine computes the prompt in chunks; after each step the handoff offers the blocks that became final.
3. The last chunk yields the first token of each sample, for the router and for the puller's manifest.
4. The call stays open until the handoff is over: the puller has acknowledged the pages or left, or the lease has ended.

The handoff is aborted and its pages are freed when the router closes the call, as it does when the puller dies before
it has come, when the puller leaves and when a step fails. A request for an embedding has none of this (embedding.py).
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import grpc

from common.errors import HandoffGone, KvrelayError
from common.ids import HandoffId
from common.rpc import error_boundary
from common.structured import do_nothing, end_all, for_each
from common.tracing import Stages
from engine.events import EngineEvent, Failed, PrefillProgress, Started, Tokens
from engine.request import EngineRequest
from engine.steps.group import Group
from kv_transfer.handoff import FirstToken, Handoff, HandoffManifest
from kvrelay.v1 import prefill_pb2 as pb
from kvrelay.v1 import prefill_pb2_grpc, sequence_pb2
from prefill_worker.embedding import cancel, embed, started_to_proto
from worker.output import OutputStreams, fill_prompt_logprobs
from worker.runtime import WorkerRuntime
from worker.serving import Plane, PlaneService

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves one runtime."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        runtime = self._runtime
        async with error_boundary(context, "Prefill"):
            holding = runtime.quarantine.holding(request.sequence)
            tracing = runtime.tracing(request.sequence, "prefill")
            with runtime.calls.request(), tracing as stages, holding, ExitStack() as entering:
                stages.enter("door")
                runtime.check_epoch(request.epoch)
                spec = await runtime.engine_request(request.sequence)
                source = request.source if request.HasField("source") else None
                # Before the handoff begins: the puller learns of a refusal from the router alone.
                entering.enter_context(runtime.prefill_gate.entering(request.sequence))
                if spec.pooling is not None:
                    await embed(runtime, spec, source, entering, context, stages)
                else:
                    await self._prefill(spec, HandoffId(request.handoff_id), source, entering, context, stages)

    async def _prefill(
        self,
        spec: EngineRequest,
        handoff_id: HandoffId,
        source: sequence_pb2.KvSource | None,
        entering: ExitStack,
        context: Context,
        stages: Stages,
    ) -> None:
        runtime = self._runtime
        events: asyncio.Queue[EngineEvent] = asyncio.Queue()  # bounded by the prompt: one entry per chunk
        granted: list[Group] = []

        def cancel_granted() -> None:
            for group in granted:
                runtime.engine.post(partial(cancel, group=group))

        # Before the engine is asked: from now on the lease cannot expire for lack of a prefill.
        handoff = runtime.handoffs.begin(handoff_id, cancel_granted)
        try:
            with runtime.prefixes.arrival() as arrival:
                await _unless_aborted(handoff, runtime.prefixes.fetch(arrival, spec, source, stages))
                stages.enter("queue")
                group = await runtime.admit(
                    lambda core: core.add_prefill_only(spec, events.put_nowait, arrival.landing)
                )
            granted.append(group)
            entering.close()
            if handoff.is_over:  # the puller left in the meantime
                cancel_granted()
                handoff.raise_if_aborted()
            await self._follow(spec, handoff, events, context, stages)
            stages.enter("handoff")
            while not handoff.is_over:
                await handoff.changed()
        except BaseException as error:
            reason = error if isinstance(error, KvrelayError) else HandoffGone("the prefill was cancelled")
            runtime.handoffs.abort(handoff, reason)
            raise

    async def _follow(
        self,
        spec: EngineRequest,
        handoff: Handoff,
        events: "asyncio.Queue[EngineEvent]",
        context: Context,
        stages: Stages,
    ) -> None:
        """Turn engine events into handoff progress and messages until the prompt is computed."""
        handoffs, num_tokens = self._runtime.handoffs, len(spec.prompt_token_ids) + len(spec.output_token_ids)
        streams = OutputStreams(spec, self._runtime.tokenizer)
        while True:
            match await _next_or_abort(events, handoff):
                case Started() as started:
                    stages.enter("chunk", after_s=started.queue_s, num_cached_tokens=started.num_cached_tokens)
                    compile_s = self._runtime.grammars.take_spent_s(spec.hash_root)
                    await context.write(pb.PrefillResponse(started=started_to_proto(started, compile_s=compile_s)))
                case PrefillProgress() as progress:
                    handoffs.progress(handoff, progress.block_table, progress.num_computed_tokens, progress.windows)
                    stages.note(num_computed_tokens=progress.num_computed_tokens)
                    if progress.num_computed_tokens < num_tokens:
                        stages.enter("chunk")
                case Tokens() as first:
                    messages, _stopped = streams.take(first.tokens)
                    tokens = tuple(
                        FirstToken(sample_index=m.sample_index, token_id=m.token_id, finished=m.finish_reason != 0)
                        for m in messages
                    )
                    handoffs.complete(handoff, _manifest(spec, handoff, tokens))
                    finished = pb.PrefillFinished(
                        first_tokens=messages,
                        prefill_s=first.prefill_s or 0.0,
                        num_pinned_tokens=first.num_pinned_tokens,
                    )
                    response = pb.PrefillResponse(finished=finished)
                    await for_each(fill_prompt_logprobs(response.finished, first.prompt_logprobs), do_nothing)
                    await context.write(response)
                    extra = {"request_id": spec.request_id, "num_tokens": handoff.num_ready_tokens}
                    logger.info("prefill done", extra=extra | {"prefill_s": first.prefill_s})
                    return
                case Failed() as failed:
                    raise failed.error


async def _next_or_abort(events: "asyncio.Queue[EngineEvent]", handoff: Handoff) -> EngineEvent:
    """Return the next event. Raises as soon as the other side aborts the handoff."""
    if events.empty():
        return await _unless_aborted(handoff, events.get())
    handoff.raise_if_aborted()
    return events.get_nowait()


async def _unless_aborted(handoff: Handoff, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancels it and raises as soon as the other side aborts the handoff."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            handoff.raise_if_aborted()
            watcher = asyncio.ensure_future(handoff.changed())
            try:
                await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            finally:
                watcher.cancel()
        return task.result()
    finally:
        await end_all((task,))


def _manifest(spec: EngineRequest, handoff: Handoff, first_tokens: tuple[FirstToken, ...]) -> HandoffManifest:
    num_tokens = len(spec.prompt_token_ids) + len(spec.output_token_ids)
    return HandoffManifest(
        num_tokens=num_tokens,
        num_blocks=len(handoff.block_table),
        last_block_hash=spec.block_hashes[-1] if spec.block_hashes else None,
        first_tokens=first_tokens,
    )


def prefill_services(runtime: WorkerRuntime) -> list[PlaneService]:
    """Return the services of the prefill pool on a runtime."""
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    return [PlaneService(Plane.CONTROL, add, PrefillService(runtime))]
