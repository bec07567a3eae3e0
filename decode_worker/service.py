"""DecodeService: reserve, pull (or prefill locally), decode, stream.

1. Router ─Decode─▶ pages are reserved for every prompt token, or the call is refused: nothing is computed for an answer
   that has no place to go.
2. With a handoff: blocks that are lacking are pulled while the prefill worker still computes; the manifest is verified;
   the sequences start behind the first tokens. Without one: the engine prefills here.
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
from kv_transfer.pull import KvPuller, Pulled, PullPlan
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
        self._connect = runtime.connect
        self._puller = KvPuller(
            store=runtime.executor.kv,
            transports=runtime.transports,
            clock=runtime.clock,
            on_bytes=lambda transport, count: runtime.bytes_received.update({transport: count}),
        )
        self._channels: dict[WorkerId, tuple[str, grpc.aio.Channel]] = {}

    async def aclose(self) -> None:
        """Close the channels to prefill workers."""
        for _address, channel in self._channels.values():
            await channel.close()

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        runtime = self._runtime
        async with error_boundary(context, "Decode"):
            with runtime.request_task():
                runtime.check_epoch(request.epoch)
                spec = engine_request(request.sequence, runtime.executor)
                events: Events = asyncio.Queue()  # bounded by max_tokens: one entry per step
                has_handoff = request.HasField("handoff")
                group = await runtime.engine.acquire(
                    lambda core: (core.reserve if has_handoff else core.add)(spec, events.put_nowait),
                    _cancel_if_granted,
                )
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

    async def _pull(self, spec: EngineRequest, group: Group, handoff: pb.Handoff) -> Pulled:
        leader = group.leader  # reserved: nothing but this call changes it
        block_size = leader.block_size
        plan = PullPlan(
            peer=WorkerId(handoff.prefill_worker_id),
            handoff_id=HandoffId(handoff.handoff_id),
            epoch=Epoch(handoff.prefill_epoch),
            block_table=leader.block_ids(),
            first_block=leader.num_cached // block_size,
            num_tokens=leader.num_tokens,
            last_block_hash=spec.block_hashes[-1] if spec.block_hashes else None,
            num_samples=spec.sampling.n,
            first_sample_index=spec.first_sample_index,
        )
        return await self._puller.pull(plan, await self._channel(plan.peer, handoff.prefill_address))

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
                        queue_s=started.queue_s, num_cached_tokens=started.num_cached_tokens
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

    async def _channel(self, peer: WorkerId, address: str) -> grpc.aio.Channel:
        """Return the channel to a prefill worker; a restarted one has another address."""
        known = self._channels.get(peer)
        if known is not None and known[0] == address:
            return known[1]
        channel = self._connect(address)
        self._channels[peer] = (address, channel)  # before the await: another call must find it
        if known is not None:
            await known[1].close(grace=1.0)
        return channel


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
