"""DecodeService: reserve, pull (or prefill locally), decode, stream.

1. Router ─Decode─▶ pages are reserved for every prompt token, or the call is refused: nothing is computed for an answer
   that has no place to go.
2. With a handoff: blocks that are lacking are pulled while the prefill worker still computes; the manifest is verified;
   the sequences start behind the first tokens. Without one: the engine prefills here, after leading blocks have been
   pulled from another worker's cache where the router says so.
3. Tokens stream, one message per engine step at most. The end of the call, for whatever reason, frees everything.
"""

import asyncio
import logging
from functools import partial
from typing import Any

import grpc

from common.errors import KvIncomplete, Overloaded, Refused
from common.ids import Epoch, HandoffId, WorkerId
from common.rpc import error_boundary
from engine.core import EngineCore
from engine.events import EngineEvent, Failed, Started, Tokens
from engine.group import Group
from engine.sequence import EngineRequest
from kv_transfer.handoff import HandoffManifest
from kv_transfer.pull import Pulled, PullPlan
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1 import decode_pb2_grpc, sampling_pb2, worker_pb2
from worker.output import OutputStreams, prompt_logprobs_to_proto
from worker.request import engine_request
from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Events = asyncio.Queue[EngineEvent]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one runtime."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        runtime = self._runtime
        async with error_boundary(context, "Decode"):
            with runtime.request_task():
                runtime.check_epoch(request.epoch)
                spec = engine_request(request.sequence, runtime.executor)
                events: Events = asyncio.Queue()  # bounded by max_tokens: one entry per step
                has_handoff = request.HasField("handoff")
                enter = self._reserve if has_handoff else self._add
                group = await enter(spec, events, request)
                if isinstance(group, Refused):
                    raise Overloaded(group.reason, retry_after_s=group.retry_after_s)
                try:
                    streams = OutputStreams(spec, runtime.tokenizer)
                    reserved = pb.Reserved(num_cached_tokens=group.leader.num_cached if has_handoff else 0)
                    await context.write(pb.DecodeResponse(reserved=reserved))
                    if has_handoff:
                        pulled = await self._pull(spec, group, request.handoff)
                        await self._start(group, pulled.manifest, streams)
                        await context.write(pb.DecodeResponse(transferred=_stats(pulled)))
                    num_steps = await self._stream(group, events, streams, context)
                    logger.info("decode done", extra={"request_id": spec.request_id, "num_steps": num_steps})
                finally:
                    runtime.engine.post(lambda core: core.cancel(group))

    async def _reserve(self, spec: EngineRequest, events: Events, _request: pb.DecodeRequest) -> Group | Refused:
        return await self._runtime.engine.acquire(
            lambda core: core.reserve(spec, events.put_nowait), _cancel_if_granted
        )

    async def _add(self, spec: EngineRequest, events: Events, request: pb.DecodeRequest) -> Group | Refused:
        """Put a request in line that is computed here; leading blocks are pulled first where the router says so."""
        runtime = self._runtime
        with runtime.prefixes.arrival() as arrival:
            if request.HasField("source"):
                await arrival.pull(spec, request.source)
            return await runtime.engine.acquire(
                lambda core: core.add(spec, events.put_nowait, arrival.landing), _cancel_if_granted
            )

    async def _pull(self, spec: EngineRequest, group: Group, handoff: pb.Handoff) -> Pulled:
        leader = group.leader  # reserved: nothing but this call changes it
        plan = PullPlan(
            peer=WorkerId(handoff.prefill_worker_id),
            epoch=Epoch(handoff.prefill_epoch),
            wanted=WantedHandoff(
                handoff_id=HandoffId(handoff.handoff_id),
                num_tokens=leader.num_tokens,
                num_blocks=len(leader.block_table),
                last_block_hash=spec.block_hashes[-1] if spec.block_hashes else None,
                num_samples=spec.sampling.n,
                first_sample_index=spec.first_sample_index,
            ),
            block_table=leader.block_ids(),
            first_block=leader.num_cached // leader.block_size,
        )
        runtime = self._runtime
        return await runtime.puller.pull(plan, await runtime.peers.get(plan.peer, handoff.prefill_address))

    async def _start(self, group: Group, manifest: HandoffManifest, streams: OutputStreams) -> None:
        first = [(token.token_id, token.finished) for token in manifest.first_tokens]
        for token in manifest.first_tokens:
            if token.token_id >= self._runtime.executor.vocab_size:  # it would fail a whole step, for everybody
                raise KvIncomplete(f"first token {token.token_id} is not in the vocabulary")
            if token.finished:
                streams.end(token.sample_index)
            else:
                streams.skip(token.sample_index, token.token_id)

        def start(core: EngineCore) -> None:
            core.commit(group, manifest.num_tokens)
            core.start(group, first)

        await self._runtime.engine.call(start)

    async def _stream(self, group: Group, events: Events, streams: OutputStreams, context: Context) -> int:
        """Send tokens until every sample has ended; returns the number of steps that brought some."""
        num_steps = 0
        while not streams.is_over:
            match await events.get():
                case Started() as started:
                    message = pb.LocalPrefillStarted(
                        queue_s=started.queue_s,
                        num_cached_tokens=started.num_cached_tokens,
                        num_pulled_tokens=started.num_pulled_tokens,
                    )
                    await context.write(pb.DecodeResponse(prefill_started=message))
                case Tokens() as tokens:
                    await self._send(group, tokens, streams, context)
                    num_steps += 1
                case Failed() as failed:
                    raise failed.error
        return num_steps

    async def _send(self, group: Group, tokens: Tokens, streams: OutputStreams, context: Context) -> None:
        messages: list[sampling_pb2.SampleToken] = []
        runs: list[sampling_pb2.TokenRun] = []
        if streams.has_text:
            messages, stopped = streams.take(tokens.tokens)
            for sample_index in stopped:
                self._runtime.engine.post(partial(EngineCore.finish_sample, group=group, sample_index=sample_index))
        else:
            runs = streams.take_runs(tokens)
        if messages or runs:
            batch = pb.TokenBatch(
                tokens=messages,
                runs=runs,
                prompt_logprobs=prompt_logprobs_to_proto(tokens.prompt_logprobs),
                prefill_s=tokens.prefill_s or 0.0,
            )
            await context.write(pb.DecodeResponse(tokens=batch))


def _cancel_if_granted(core: EngineCore, group: Group | Refused) -> None:
    if isinstance(group, Group):
        core.cancel(group)


def _stats(pulled: Pulled) -> worker_pb2.TransferStats:
    return worker_pb2.TransferStats(
        num_blocks=pulled.num_blocks,
        kv_bytes=pulled.kv_bytes,
        transfer_s=pulled.transfer_s,
        exposed_s=pulled.exposed_s,
        transport=worker_pb2.KvTransport.ValueType(pulled.transport),
    )
