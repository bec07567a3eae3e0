"""Calls of workers as a router makes them, and their answers, which must be the oracle's."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.errors import KvrelayError, from_rpc_error
from common.ids import Epoch, HandoffId, WorkerId, mint_handoff_id
from common.trust.tickets import PullRight, of_blocks, of_handoff
from common.wire import pack_tokens, sampling_to_proto
from engine.request import EngineRequest
from kvrelay.v1 import decode_pb2, prefill_pb2, sequence_pb2, worker_pb2
from router.fleet.decode_stream import DecodeStream
from tests.builders import BLOCK_SIZE, expected_tokens
from tests.engine.beam_oracle import expected_beams
from tests.trust import ROUTER
from worker.serving import RunningWorker

Source = sequence_pb2.KvSource | None


def spec_of(request: EngineRequest) -> sequence_pb2.SequenceSpec:
    """Return the message for a request."""
    return sequence_pb2.SequenceSpec(
        request_id=request.request_id,
        prompt_tokens=pack_tokens(request.prompt_token_ids),
        output_tokens=pack_tokens(request.output_token_ids),
        hash_root=request.hash_root,
        sampling=sampling_to_proto(request.sampling),
        first_sample_index=request.first_sample_index,
    )


@dataclass
class Answer:
    """An answer as a client sees it."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    transfer: worker_pb2.TransferStats | None = None
    num_decode_cached: int = 0
    num_cached: int = 0
    """On the worker that computed the prompt, pulled ones included."""
    num_pulled: int = 0

    def start(self, started: Any) -> None:
        """Take over what the computing worker found."""
        self.num_cached, self.num_pulled = started.num_cached_tokens, started.num_pulled_tokens

    def take(self, token: Any) -> None:
        """Append one token; indexes must be consecutive."""
        mine = self.tokens.setdefault(token.sample_index, [])
        assert token.token_index == len(mine), (token.token_index, len(mine))
        mine.append(token.token_id)
        self.text[token.sample_index] = self.text.get(token.sample_index, "") + token.text

    def checked(self, request: EngineRequest) -> "Answer":
        """Return this answer. Its tokens must be the oracle's, which knows no stop strings."""
        if request.sampling.has_beams:
            assert self.tokens == dict(enumerate(expected_beams(request)))
        elif not request.sampling.stop:
            assert self.tokens == {i: expected_tokens(request, sample=i) for i in range(request.sampling.n)}
        return self


@dataclass
class Pair:
    """A running pair of workers."""

    prefill: RunningWorker
    decode: RunningWorker
    prefill_stub: Any
    decode_stub: Any

    def handoff(self, handoff_id: str) -> decode_pb2.Handoff:
        """Return the message that tells the decode worker where to pull from."""
        return decode_pb2.Handoff(
            handoff_id=handoff_id,
            prefill_worker_id=self.prefill.runtime.worker_id,
            prefill_address=self.prefill.kv_address,
            prefill_epoch=self.prefill.runtime.epoch,
            ticket=ROUTER.issue(
                PullRight(
                    puller=self.decode.runtime.worker_id,
                    source=self.prefill.runtime.worker_id,
                    epoch=self.prefill.runtime.epoch,
                    subject=of_handoff(HandoffId(handoff_id)),
                )
            ),
        )

    def open_decode(self, request: EngineRequest, handoff_id: str | None, source: Source = None) -> "DecodeCall":
        """Open a decode call."""
        handoff = None if handoff_id is None else self.handoff(handoff_id)
        return self.open_decode_of(spec_of(request), handoff=handoff, source=allowed(source, request, self.decode))

    def open_decode_of(self, spec: sequence_pb2.SequenceSpec, **fields: Any) -> "DecodeCall":
        """Open a decode call for a message."""
        fields = {"epoch": self.decode.runtime.epoch} | fields
        return DecodeCall(self.decode_stub, decode_pb2.DecodeRequest(sequence=spec, **fields))

    def open_prefill(self, request: EngineRequest, handoff_id: str, source: Source = None) -> Any:
        """Open a Prefill call."""
        return self.prefill_stub.Prefill(
            prefill_pb2.PrefillRequest(
                sequence=spec_of(request),
                handoff_id=handoff_id,
                epoch=self.prefill.runtime.epoch,
                source=allowed(source, request, self.prefill),
            )
        )

    async def generate(self, request: EngineRequest, source: Source = None) -> Answer:
        """Serve a request by handoff, as a router would; its answer must be the oracle's."""
        return (await self.answer(request, source)).checked(request)

    async def answer(self, request: EngineRequest, source: Source = None) -> Answer:
        """Serve a request by handoff; its answer is whatever comes."""
        handoff_id = mint_handoff_id()
        answer = Answer()
        decode = self.open_decode(request, handoff_id)
        first = await decode.read()
        answer.num_decode_cached = first.reserved.num_cached_tokens
        async for message in messages(self.open_prefill(request, handoff_id, source)):
            if message.HasField("started"):
                answer.start(message.started)
            for token in message.finished.first_tokens:
                answer.take(token)
        async for message in messages(decode):
            if message.HasField("transferred"):
                answer.transfer = message.transferred
            for token in message.tokens.tokens:
                answer.take(token)
        return answer

    async def generate_locally(self, request: EngineRequest, source: Source = None) -> Answer:
        """Serve a request on the decode worker alone; its answer must be the oracle's."""
        return (await self.answer_locally(request, source)).checked(request)

    async def answer_locally(self, request: EngineRequest, source: Source = None) -> Answer:
        """Serve a request on the decode worker alone; its answer is whatever comes."""
        answer = Answer()
        async for message in messages(self.open_decode(request, None, source)):
            if message.HasField("prefill_started"):
                answer.start(message.prefill_started)
            for token in message.tokens.tokens:
                answer.take(token)
        return answer


class DecodeCall:
    """One decode call on a stream of its own; read like a call of gRPC."""

    def __init__(self, stub: Any, request: decode_pb2.DecodeRequest) -> None:
        self._stream = stub.DecodeMany()
        self._call = DecodeStream(self._stream).open(request)

    async def read(self) -> Any:
        """Return the next response, or EOF at a good end. Raises KvrelayError."""
        response = await self._call.receive()
        return grpc.aio.EOF if response is None else response

    def cancel(self) -> None:
        """Leave the stream."""
        self._stream.cancel()


def allowed(source: Source, request: EngineRequest, puller: RunningWorker) -> Source:
    """Return a source with a router's ticket for what a request's worker will ask it for."""
    if source is None:
        return None
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    num_blocks = min(source.num_blocks, (num_tokens - 1) // BLOCK_SIZE)
    right = PullRight(
        puller=puller.runtime.worker_id,
        source=WorkerId(source.worker_id),
        epoch=Epoch(source.epoch),
        subject=of_blocks(request.block_hashes[:num_blocks].packed),
    )
    with_ticket = sequence_pb2.KvSource(ticket=ROUTER.issue(right), num_blocks=num_blocks)
    with_ticket.MergeFrom(sequence_pb2.KvSource(worker_id=source.worker_id, address=source.address, epoch=source.epoch))
    return with_ticket


async def until_prefilled(call: Any) -> None:
    """Read a Prefill call up to the first tokens; it stays open until its handoff is over."""
    while not (await call.read()).HasField("finished"):
        pass


async def messages(call: Any) -> AsyncIterator[Any]:
    """Read the rest of a call (after a `read` it cannot be iterated). Raises KvrelayError."""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def error_of(call: Any) -> KvrelayError:
    """Read a call to its end and return the error it must end with."""
    try:
        async for _message in messages(call):
            pass
    except KvrelayError as error:
        return error
    raise AssertionError("the call ended without an error")
