"""Collects the events of a request into a complete answer."""

from dataclasses import dataclass, field

from common.chat.parsing import has_markup
from common.errors import Cancelled, EngineFault
from common.wire_names import FinishReason
from kvrelay.client.chat import Message, MessageDelta, MessageReader
from kvrelay.client.convert import events_from_proto
from kvrelay.client.events import (
    Accepted,
    Completed,
    Event,
    PlanChosen,
    PositionLogprobs,
    PromptLogprobs,
    SampleSoFar,
    Token,
    TokenRun,
)
from kvrelay.client.requests import resumed_request
from kvrelay.client.results import Generation, Sample
from kvrelay.client.streams import AsyncStream, BlockingStream, Buffer
from kvrelay.v1 import inference_pb2

_INCOMPLETE = "the server ended the stream before the answer was complete"


@dataclass(slots=True)
class _SampleBuilder:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reader: MessageReader | None = None
    """Reads the message where the text of a chat's answer has markup."""
    is_chat: bool = False

    def add(self, token: Token) -> MessageDelta | None:
        """Take the next token and return what it adds to the message."""
        self._check_follows(token.sample_index, token.token_index)
        self.texts.append(token.text)
        self.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        self.finish_reason = token.finish_reason
        if self.reader is None:
            return None
        return self.reader.read(token.text, is_last=token.finish_reason is not None)

    def add_run(self, run: TokenRun) -> None:
        self._check_follows(run.sample_index, run.first_token_index)
        self.token_ids.extend(run.token_ids)
        self.finish_reason = run.finish_reason

    def _check_follows(self, sample_index: int, token_index: int) -> None:
        if self.finish_reason is not None or token_index != len(self.token_ids):
            raise EngineFault(
                f"sample {sample_index}: token {token_index} arrived after {len(self.token_ids)} tokens"
                + (", when the sample had ended" if self.finish_reason else "")
            )

    def build(self, sample_index: int) -> Sample:
        if self.finish_reason is None:
            raise EngineFault(f"sample {sample_index} has no end after {len(self.token_ids)} tokens")
        text = "".join(self.texts)
        message = Message(content=text, reasoning="", tool_calls=()) if self.is_chat else None
        return Sample(
            text=text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs) or None,
            message=message if self.reader is None else self.reader.message(),
        )


class EventBuffer(Buffer[Event]):
    """Events of one request, and the answer that they make up."""

    def __init__(self) -> None:
        super().__init__()
        self._accepted: Accepted | None = None
        self._plans: list[PlanChosen] = []
        self._prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
        self._samples: dict[int, _SampleBuilder] = {}
        self._completed: Completed | None = None

    def feed(self, message: inference_pb2.GenerateResponse) -> bool:
        """Take one message; returns whether tokens came. Raises EngineFault for missing or repeated ones."""
        for event in events_from_proto(message):
            delta: MessageDelta | None = None
            match event:
                case Token():
                    delta = self._sample(event.sample_index).add(event)
                case TokenRun():
                    self._sample(event.sample_index).add_run(event)
                case Accepted():
                    self._accepted = event
                case PlanChosen():
                    self._plans.append(event)
                case PromptLogprobs():
                    self._prompt_logprobs = event.positions
                case Completed():
                    self._completed = event
            self._pending.append(event)
            if delta is not None:
                self._pending.append(delta)
        return message.HasField("tokens")

    def _sample(self, sample_index: int) -> _SampleBuilder:
        """Return the builder of a sample, made at its first token."""
        if sample_index not in self._samples:
            answer = None if self._accepted is None else self._accepted.answer_format
            reader = MessageReader(answer, sample_index) if answer is not None and has_markup(answer) else None
            self._samples[sample_index] = _SampleBuilder(reader=reader, is_chat=answer is not None)
        return self._samples[sample_index]

    def so_far(self) -> tuple[SampleSoFar, ...]:
        """Return what has arrived of the samples, taken or not, up to the last sample with any token."""
        samples = [self._samples.get(index, _SampleBuilder()) for index in range(max(self._samples, default=-1) + 1)]
        return tuple(
            SampleSoFar(token_ids=tuple(sample.token_ids), is_finished=sample.finish_reason is not None)
            for sample in samples
        )

    def resumed(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
        """Return the request for what is still missing; the request itself before any token."""
        samples, accepted = self.so_far(), self._accepted
        if not samples or accepted is None:
            return request
        resumed = resumed_request(request, samples, accepted)
        # Only the first router that shortens the answer says so: the others get the shorter limit.
        if shortened := next((plan.shortened_max_tokens for plan in self._plans if plan.shortened_max_tokens), 0):
            resumed.sampling.max_tokens = shortened
        return resumed

    def finish(self) -> None:
        """Note the regular end. Raises EngineFault when the last event is missing."""
        super().finish()
        if self._completed is None:
            raise EngineFault(_INCOMPLETE)

    def build(self) -> Generation:
        """Return the answer. Raises Cancelled when the stream was closed before its end, EngineFault for gaps."""
        accepted, completed = self._accepted, self._completed
        if completed is None:
            raise Cancelled("the stream was closed before the answer was complete")
        if accepted is None or not self._plans or not self._samples:
            raise EngineFault(_INCOMPLETE)
        return Generation(
            request_id=accepted.request_id,
            samples=tuple(self._samples[index].build(index) for index in sorted(self._samples)),
            plans=tuple(self._plans),
            prompt_logprobs=self._prompt_logprobs,
            usage=completed.usage,
            timings=completed.timings,
            transfer=completed.transfer,
            seed=completed.seed,
        )


class GenerationStream(BlockingStream[Event]):
    """The events of one request, as they arrive."""

    _events: EventBuffer

    def result(self) -> Generation:
        """Read the rest and return the whole answer. Raises Cancelled when the stream was closed before its end."""
        for _ in self:
            pass
        return self._events.build()


class AsyncGenerationStream(AsyncStream[Event]):
    """The events of one request, as they arrive."""

    _events: EventBuffer

    async def result(self) -> Generation:
        """Read the rest and return the whole answer. Raises Cancelled when the stream was closed before its end."""
        async for _ in self:
            pass
        return self._events.build()
