"""One answer at a decode worker, from its reservation to its last token.

1. Pages are reserved for every prompt token, or the call is refused: nothing is computed for an answer without room.
2. With a handoff, missing blocks are pulled while the prefill worker still computes, the manifest is verified, and the
   sequences start after the first tokens. Without one, the engine prefills here, after leading blocks were pulled from
   another worker's cache if the router names one.
3. The engine's events become messages in the callback that brings them, without a task in between. Every end of the
   call frees everything.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from common.errors import Cancelled, InvalidRequest, KvIncomplete, KvrelayError
from common.ids import Epoch, HandoffId, WorkerId
from common.rpc import to_report
from common.wire import message_of
from decode_worker.direct import GRACE_S, DirectAnswer, DirectTable
from decode_worker.shared_stream import Outlet
from engine.events import BeamsAdvanced, EngineEvent, Failed, Started, Tokens
from engine.executor import Logprobs
from engine.interface import Engine
from engine.request import EngineRequest
from engine.steps.group import Group
from kv_transfer.handoff import HandoffManifest
from kv_transfer.pull import Pulled, PullPlan
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1 import sampling_pb2, worker_pb2
from worker.output import OutputStreams, beams_to_proto, fill_prompt_logprobs, repeat_output
from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

_MAX_ENTRIES = 4096
"""Log-probabilities of a prompt that one turn of the event loop converts, in some milliseconds."""


class _PromptLogprobs:
    """Log-probabilities of a prompt on their way into a message, a part at a time."""

    def __init__(self, entries: Sequence[Logprobs]) -> None:
        self.message = pb.DecodeResponse()
        self._filling = fill_prompt_logprobs(self.message.tokens, entries)
        self._num_left = len(entries)
        self._num_at_once = max(1, _MAX_ENTRIES // (1 + len(entries[0].top)))

    def go_on(self) -> bool:
        """Convert a part; returns whether it was the last one."""
        for _ in islice(self._filling, self._num_at_once):
            self._num_left -= 1
        return not self._num_left


class DecodeCall:
    """Serves one DecodeRequest into an outlet. Event loop only."""

    def __init__(self, runtime: WorkerRuntime, directs: DirectTable, outlet: Outlet) -> None:
        self._runtime = runtime
        self._directs = directs
        self._direct: DirectAnswer | None = None
        """Set when the client streams the answer directly; the outlet then gets checkpoints only."""
        self._outlet = outlet
        self._held: list[EngineEvent] | None = []
        """Events that wait for earlier messages; None once those were sent."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_steps = 0
        self._large: deque[EngineEvent] = deque()
        """Events that are sent in parts, and those after them."""
        self._prompt: _PromptLogprobs | None = None
        """Set while log-probabilities of the prompt are converted."""

    async def run(self, request: pb.DecodeRequest) -> None:
        """Serve the request until every sample has ended. Frees everything at its end. Raises KvrelayError."""
        runtime = self._runtime
        tracing = runtime.tracing(request.sequence, "decode")
        with runtime.calls.request(), tracing as self._stages, runtime.quarantine.holding(request.sequence):
            has_handoff = request.HasField("handoff")
            self._stages.enter("reserve" if has_handoff else "door")
            runtime.check_epoch(request.epoch)
            spec = await runtime.engine_request(request.sequence)
            if spec.pooling is not None:
                raise InvalidRequest("prefill workers compute embeddings", field="sequence.pooling")
            if request.HasField("direct"):  # the router knows fewer of its tokens than the client
                spec = replace(spec, must_repeat=True)
            self._streams = OutputStreams(spec, runtime.tokenizer)
            group = await (
                runtime.admit(lambda core: core.reserve(spec, self._sink)) if has_handoff else self._add(spec, request)
            )
            self._group = group
            try:
                self._open_direct(request, spec)
                reserved = pb.Reserved(
                    num_cached_tokens=group.leader.num_cached_tokens if has_handoff else 0,
                    compile_s=runtime.grammars.take_spent_s(spec.hash_root),
                )
                self._outlet.put(pb.DecodeResponse(reserved=reserved))
                if has_handoff:
                    self._stages.enter("transfer", source=request.handoff.prefill_worker_id)
                    pulled = await self._pull(spec, request.handoff)
                    self._stages.note(
                        num_blocks=pulled.num_blocks, kv_bytes=pulled.kv_bytes, exposed_s=pulled.exposed_s
                    )
                    self._stages.enter("decode")
                    await self._start(pulled.manifest)
                    self._outlet.put(pb.DecodeResponse(transferred=message_of(worker_pb2.TransferStats, pulled)))
                await self._until_over()
                if self._direct is not None:
                    await self._direct.delivered()
                logger.info("decode done", extra={"request_id": spec.request_id, "num_steps": self._num_steps})
            finally:
                runtime.engine.post(lambda core: core.cancel(group))
                if self._direct is not None:
                    self._close_direct(self._direct)
                self._over.cancel()

    def _open_direct(self, request: pb.DecodeRequest, spec: EngineRequest) -> None:
        if request.HasField("direct"):
            samples = range(spec.first_sample_index, spec.first_sample_index + spec.sampling.n)
            earlier = repeat_output(spec, self._runtime.tokenizer)
            self._direct = DirectAnswer(request.direct, samples, earlier, self._outlet.put_tokens, self._lose_client)
            self._directs.add(self._direct)

    def _lose_client(self, error: KvrelayError) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _close_direct(self, answer: DirectAnswer) -> None:
        """End the client's stream. A client that got everything may still come back for messages that were lost."""
        if answer.is_delivered:
            asyncio.get_running_loop().call_later(GRACE_S, self._directs.remove, answer)
        else:
            self._directs.remove(answer)
            answer.close(Cancelled("the answer is no longer generated here"))

    async def _add(self, spec: EngineRequest, request: pb.DecodeRequest) -> Group:
        """Queue a request that is computed here; leading blocks are pulled first if the router names a source."""
        runtime = self._runtime
        with runtime.prefill_gate.entering(request.sequence), runtime.prefixes.arrival() as arrival:
            source = request.source if request.HasField("source") else None
            await runtime.prefixes.fetch(arrival, spec, source, self._stages)
            self._stages.enter("queue")
            return await runtime.admit(lambda core: core.add(spec, self._sink, arrival.landing))

    async def _pull(self, spec: EngineRequest, handoff: pb.Handoff) -> Pulled:
        leader = self._group.leader  # reserved: only this call changes it
        plan = PullPlan(
            peer=WorkerId(handoff.prefill_worker_id),
            epoch=Epoch(handoff.prefill_epoch),
            wanted=WantedHandoff(
                handoff_id=HandoffId(handoff.handoff_id),
                num_tokens=leader.num_tokens,
                num_blocks=len(leader.block_table),
                last_block_hash=spec.block_hashes[-1] if spec.block_hashes else None,
                num_samples=0 if spec.sampling.has_beams else spec.sampling.n,
                first_sample_index=spec.first_sample_index,
            ),
            block_table=leader.block_ids(),
            windows=leader.awaited_windows,
            first_block=leader.num_cached_tokens // leader.block_size,
            ticket=handoff.ticket,
        )
        runtime = self._runtime
        async with runtime.peers.use(plan.peer, handoff.prefill_address) as channel:
            return await runtime.puller.pull(plan, channel)

    async def _start(self, manifest: HandoffManifest) -> None:
        group, streams = self._group, self._streams
        first = [(token.token_id, token.finished) for token in manifest.first_tokens]
        for token in manifest.first_tokens:
            if token.token_id >= self._runtime.executor.vocab_size:  # it would fail a whole step, for all requests
                raise KvIncomplete(f"first token {token.token_id} is not in the vocabulary")
            if token.finished:
                streams.end(token.sample_index)
            else:
                streams.skip(token.sample_index, token.token_id)

        def start(core: Engine) -> None:
            core.commit(group, manifest.num_tokens)
            core.start(group, first)

        await self._runtime.engine.call(start)

    async def _until_over(self) -> None:
        """Send the events, the held ones first, until every sample has ended."""
        held, self._held = self._held, None
        for event in held or ():
            self._sink(event)
        if not self._streams.is_over:
            await self._over

    def _sink(self, event: EngineEvent) -> None:
        """Take an event of the engine. An error ends this call only, not others of the same step."""
        if self._held is not None:
            self._held.append(event)
        elif self._large or (isinstance(event, Tokens) and (self._group.beams is not None or event.prompt_logprobs)):
            self._large.append(event)
            if len(self._large) == 1:
                asyncio.get_running_loop().call_soon(self._emit_large)
        else:
            self._try(self._emit, event)

    def _emit_large(self) -> None:
        """Send a part of a large event, and the rest later, so that other calls go on."""
        self._try(self._emit_part, self._large[0])
        if self._large and not self._over.done():
            asyncio.get_running_loop().call_soon(self._emit_large)

    def _emit_part(self, event: EngineEvent) -> None:
        if isinstance(event, Tokens) and event.prompt_logprobs:
            self._prompt = self._prompt or _PromptLogprobs(event.prompt_logprobs)
            if not self._prompt.go_on():
                return
        self._emit(self._large.popleft())

    def _try(self, emit: Callable[[EngineEvent], None], event: EngineEvent) -> None:
        if not self._over.done():
            try:
                emit(event)
            except Exception as error:  # noqa: BLE001 - the top of a callback that serves other calls as well
                self._over.set_exception(to_report(error, "Decode"))

    def _emit(self, event: EngineEvent) -> None:
        match event:
            case Started() as started:
                self._stages.enter("prefill", after_s=started.queue_s, num_cached_tokens=started.num_cached_tokens)
                message = pb.LocalPrefillStarted(
                    queue_s=started.queue_s,
                    num_cached_tokens=started.num_cached_tokens,
                    num_pulled_tokens=started.num_pulled_tokens,
                )
                self._outlet.put(pb.DecodeResponse(prefill_started=message))
            case Tokens() as tokens:
                self._emit_tokens(tokens)
                if self._streams.is_over:
                    self._over.set_result(None)
            case BeamsAdvanced() as advanced:
                self._outlet.put(pb.DecodeResponse(beams=beams_to_proto(advanced.snapshot)))
            case Failed() as failed:
                raise failed.error

    def _finish(self, sample_index: int) -> None:
        self._runtime.engine.post(lambda core: core.finish_sample(self._group, sample_index))

    def _emit_tokens(self, tokens: Tokens) -> None:
        self._num_steps += 1
        if tokens.prefill_s is not None:
            self._stages.enter("decode")
        messages: list[sampling_pb2.SampleToken] = []
        runs: list[sampling_pb2.TokenRun] = []
        if self._streams.has_text:
            messages, stopped = self._streams.take(tokens.tokens)
            for sample_index in stopped:
                self._finish(sample_index)
        else:
            runs = self._streams.take_runs(tokens)
        has_tokens = bool(messages or runs)
        if has_tokens or tokens.prefill_s is not None:
            batch = pb.TokenBatch(
                tokens=messages,
                runs=runs,
                prefill_s=tokens.prefill_s or 0.0,
                num_drafted_tokens=tokens.drafts.num_drafted,
                num_accepted_tokens=tokens.drafts.num_accepted,
                num_pinned_tokens=tokens.num_pinned_tokens,
            )
            prompt, self._prompt = self._prompt, None
            if prompt is not None:  # which it would take long to copy
                prompt.message.tokens.MergeFrom(batch)
                batch = prompt.message.tokens
            if self._direct is None or not has_tokens:
                if prompt is None:
                    self._outlet.put_tokens(batch)
                else:
                    self._outlet.put(prompt.message)
            else:
                self._direct.put(batch)
