"""The answer to one call: written event by event, or collected and written at its end.

Events are concatenated strings, most of which are rendered once: per token only its text becomes JSON. Tokens that
have collected in an outbox go out in one write, with one event for each choice.
"""

import json
import time
from abc import ABC, abstractmethod
from typing import Any

from common.ids import RequestId
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.http.calls import Call
from router.http.exchange import Exchange
from router.http.pieces import Piece, Prompt, Prompts, RequestFacts, by_sample, report_of, usage_of
from router.http.styles import Style
from router.record import Job

_quote = json.JSONEncoder().encode
"""JSON of one value; for text this is one call into C."""
_DONE = "data: [DONE]\n\n"


class Answer(ABC):
    """Takes the tokens of a call's requests. One task for each request; `finish` after all of them."""

    def __init__(self, call: Call, style: Style, exchange: Exchange, *, answer_id: RequestId) -> None:
        self.facts: dict[int, RequestFacts] = {}
        """Facts about each request, by its position in the call."""
        self._call = call
        self._style = style
        self._exchange = exchange
        self._prompts = Prompts()
        self._id = style.id_prefix + answer_id
        self._model = ""

    def open(self, position: int, job: Job, echo: str | None) -> None:
        """Begin a request; `echo` is the prompt's text where the caller wants to see it again."""
        self._model = job.model.name
        self._prompts.open(position, Prompt(token_ids=job.prompt_token_ids, echo=echo))

    @abstractmethod
    async def take(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Take new tokens of a request."""

    @abstractmethod
    def finish(self) -> None:
        """End the answer: every request is complete."""

    def _report(self) -> dict[str, Any]:
        return {"kvrelay": report_of(self.facts.values())} if self._call.wants_report else {}


class StreamedAnswer(Answer):
    """Server-sent events."""

    def __init__(self, call: Call, style: Style, exchange: Exchange, *, answer_id: RequestId) -> None:
        super().__init__(call, style, exchange, answer_id=answer_id)
        self._created = int(time.time())
        self._head = ""
        self._is_plain = not (call.wants_logprobs or call.wants_token_ids or call.wants_running_usage)
        """An event tells nothing but text of a token."""
        self._usage = ',"usage":null' if call.wants_usage else ""
        self._text_end = f'{style.text_close},"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'
        self._text_begins: dict[int, str] = {}
        """Beginning of an event by choice, once the choice's first piece is out."""
        # For running counts.
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def open(self, position: int, job: Job, echo: str | None) -> None:
        """Begin a request."""
        super().open(position, job, echo)
        self._num_prompt_tokens += len(job.prompt_token_ids)
        self._head = (
            f'data: {{"id":{_quote(self._id)},"object":"{self._style.chunk_name}","created":{self._created},'
            f'"model":{_quote(self._model)},"choices":['
        )

    async def take(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Write an event for each choice that got tokens, in one write."""
        first = position * self._call.num_samples
        if len(delta.tokens) == 1 and self._is_plain:  # nearly always
            token = delta.tokens[0]
            begin = self._text_begins.get(first + token.sample_index)
            if begin is not None and not token.finish_reason:
                await self._exchange.write(f"{begin}{_quote(token.text)}{self._text_end}".encode())
                return
        self._prompts.note(position, delta)
        self._num_output_tokens += len(delta.tokens)
        events = [
            self._event(Piece(index=index, tokens=tokens, prompt=self._prompts.tell(position, index)))
            for index, tokens in ((first + sample, tokens) for sample, tokens in by_sample(delta).items())
        ]
        await self._exchange.write("".join(events).encode())

    def finish(self) -> None:
        """Write the requested counts and the end."""
        wants_usage = self._call.wants_usage or self._call.wants_running_usage
        last = ({"usage": usage_of(self.facts.values())} if wants_usage else {}) | self._report()
        extra = f"{self._head}],{_quote(last)[1:]}\n\n" if last else ""
        self._exchange.finish((extra + _DONE).encode())

    def _event(self, piece: Piece) -> str:
        style, prompt = self._style, piece.prompt
        begin = self._text_begins.get(piece.index)
        if begin is None:
            choice = f'{self._head}{{"index":{piece.index}'
            begin = self._text_begins[piece.index] = choice + style.text_open
            if style.opening:
                begin = f"{choice}{style.opening}]{self._usage}}}\n\n{begin}"
        if self._is_plain and not piece.finish_reason:
            return f"{begin}{_quote(piece.text)}{self._text_end}"
        logprobs = style.logprobs(piece) if self._call.wants_logprobs else None
        event = f'{begin}{_quote(piece.text)}{style.text_close},"logprobs":{_quote(logprobs)}'
        event += f',"finish_reason":{_quote(piece.finish_reason)}'
        outside = self._usage
        if self._call.wants_running_usage:
            outside = f',"usage":{_quote(self._running_usage())}'
        if self._call.wants_token_ids:
            event += f',"token_ids":{piece.token_ids}'
            if prompt is not None:
                prompt_ids = f',"prompt_token_ids":{prompt.token_ids.tolist()}'
                if style.prompt_ids_with_choice:
                    event += prompt_ids
                else:
                    outside += prompt_ids
        return f"{event}}}]{outside}}}\n\n"

    def _running_usage(self) -> dict[str, int]:
        prompt, output = self._num_prompt_tokens, self._num_output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


class GatheredAnswer(Answer):
    """One JSON document."""

    def __init__(self, call: Call, style: Style, exchange: Exchange, *, answer_id: RequestId) -> None:
        super().__init__(call, style, exchange, answer_id=answer_id)
        self._tokens: dict[tuple[int, int], list[sampling_pb2.SampleToken]] = {}
        """Tokens by request and choice."""

    async def take(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Keep the tokens."""
        self._prompts.note(position, delta)
        first = position * self._call.num_samples
        for sample_index, tokens in by_sample(delta).items():
            self._tokens.setdefault((position, first + sample_index), []).extend(tokens)

    def finish(self) -> None:
        """Send the document."""
        answer: dict[str, Any] = {
            "id": self._id,
            "object": self._style.object_name,
            "created": int(time.time()),
            "model": self._model,
            "choices": [],
            "usage": usage_of(self.facts.values()),
        }
        for (position, index), tokens in sorted(self._tokens.items()):
            prompt = self._prompts.tell(position, index)
            answer["choices"].append(self._choice(Piece(index=index, tokens=tokens, prompt=prompt)))
            if prompt is not None and self._call.wants_token_ids and not self._style.prompt_ids_with_choice:
                answer["prompt_token_ids"] = prompt.token_ids.tolist()
        self._exchange.finish_json(answer | self._report())

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            **self._style.choice(piece.text),
            "logprobs": self._style.logprobs(piece) if self._call.wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if self._call.wants_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.prompt is not None and self._style.prompt_ids_with_choice:
                choice["prompt_token_ids"] = piece.prompt.token_ids.tolist()
        return choice
