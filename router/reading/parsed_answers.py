"""Message deltas for clients that do not parse an answer's text themselves.

They come in the same message as the tokens whose text they are made of, whatever is merged. An answer that another
router began goes on in the middle of its markup: its parsers read the text that the client has, and report none of it.
"""

import asyncio

from common.chat.deltas import ParsedDelta, call_id
from common.chat.parsing import MessageParser
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.record.record import Job

_CHARS_A_TURN = 1024
"""Text that is parsed without a pause for other requests: some milliseconds at worst."""


class ParsedAnswer:
    """Parses the samples of one answer, each from where the client has it. Event loop only."""

    def __init__(self, answer: pb.AnswerFormat) -> None:
        self._answer = answer
        self._parsers: dict[int, MessageParser] = {}

    @classmethod
    async def of(cls, job: Job) -> "ParsedAnswer | None":
        """Return the parsers of a job's answer; None when its client wants text alone."""
        if not job.is_parsed or job.answer_format is None:
            return None
        parsed = cls(job.answer_format)
        for index, sample in enumerate(job.resumed):
            if not sample.is_finished:
                await parsed._read(index, sample.text, is_last=False)
        return parsed

    @property
    def ends_in_calls(self) -> bool:
        """Whether an answer ends in calls of tools, all of them whole."""
        return any(parser.ends_in_calls for parser in self._parsers.values())

    async def add_to(self, delta: pb.TokenDelta) -> None:
        """Set the `messages` of a delta from its tokens."""
        pending: dict[int, list[sampling_pb2.SampleToken]] = {}
        for token in delta.tokens:
            pending.setdefault(token.sample_index, []).append(token)
        for index, tokens in pending.items():
            text, is_last = "".join(token.text for token in tokens), bool(tokens[-1].finish_reason)
            said = await self._read(index, text, is_last=is_last)
            delta.messages.extend(_to_proto(index, each) for each in said if each != ParsedDelta())

    async def _read(self, index: int, text: str, *, is_last: bool) -> list[ParsedDelta]:
        """Parse the next text of a sample."""
        if index not in self._parsers:
            self._parsers[index] = MessageParser.of(self._answer)
        said = []
        for start in range(0, max(len(text), 1), _CHARS_A_TURN):
            if start:
                await asyncio.sleep(0)
            end = start + _CHARS_A_TURN
            said.append(self._parsers[index].push(text[start:end], is_last=is_last and end >= len(text)))
        return said


def _to_proto(index: int, said: ParsedDelta) -> pb.MessageDelta:
    message = pb.MessageDelta(sample_index=index, content=said.content, reasoning=said.reasoning)
    for call in said.tool_calls:
        begun = {} if call.name is None else {"id": call_id(index, call.index), "name": call.name}
        message.tool_calls.add(index=call.index, arguments=call.arguments, **begun)
    return message
