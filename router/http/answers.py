"""The answer to one call: written event by event, or collected and written at its end.

Events are concatenated strings, most of which are rendered once: per token only its text becomes JSON. Tokens that
have collected in an outbox go out in one write, with one event for each choice.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import chain
from typing import Any

from common.ids import RequestId
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.http.calls import Call
from router.http.exchange import Exchange
from router.http.json_parts import joined_parts, members_parts, merged_parts, quote
from router.http.pieces import Piece, Prompt, Prompts, RequestFacts, by_sample, report_of, usage_of
from router.http.styles import EMPTY_DELTA, Style, TokenTexts
from router.record.record import Job

_DONE = "data: [DONE]\n\n"


class Answer(ABC):
    """Takes the tokens of a call's requests. One task for each request; `finish` after all of them."""

    def __init__(self, call: Call, exchange: Exchange) -> None:
        self.facts: dict[int, RequestFacts] = {}
        """Facts about each request, by its position in the call."""
        self._call = call
        self._exchange = exchange

    @abstractmethod
    def open(self, position: int, job: Job, echo: str | None) -> None:
        """Begin a request; `echo` is the prompt's text where the caller wants to see it again."""

    @abstractmethod
    async def take(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Take new tokens of a request."""

    @abstractmethod
    def finish(self) -> None:
        """End the answer: every request is complete."""

    @property
    def ends_in_calls(self) -> bool:
        """Whether it has ended with calls of tools."""
        return False

    def beside(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what has to run beside the answer to a request from its admission on, until cancelled."""
        return (self._exchange.show_life(),) if self._call.is_streamed else ()

    def _report(self) -> dict[str, Any]:
        return {"kvrelay": report_of(self.facts.values())} if self._call.wants_report else {}


MakeAnswer = Callable[[Call, TokenTexts, Exchange, RequestId], Answer]
"""Returns the answer to a call, under the id of its first request."""


def in_style(style: Callable[[TokenTexts], Style]) -> MakeAnswer:
    """Return the factory of answers in OpenAI's style, as events or as one document."""

    def make(call: Call, texts: TokenTexts, exchange: Exchange, answer_id: RequestId) -> Answer:
        kind = StreamedAnswer if call.is_streamed else GatheredAnswer
        return kind(call, style(texts), exchange, answer_id=answer_id)

    return make


class _StyledAnswer(Answer):
    """An answer in a style."""

    def __init__(self, call: Call, style: Style, exchange: Exchange, *, answer_id: RequestId) -> None:
        super().__init__(call, exchange)
        self._style = style
        self._prompts = Prompts()
        self._id = style.id_prefix + answer_id
        self._model = ""

    def open(self, position: int, job: Job, echo: str | None) -> None:
        """Begin a request."""
        self._model = job.model.name
        self._style.open(job)
        self._prompts.open(position, Prompt(token_ids=job.prompt_token_ids, echo=echo))

    @property
    def ends_in_calls(self) -> bool:
        """See `Answer`."""
        return self._style.ends_in_calls

    def _logprobs(self, piece: Piece) -> Iterator[str]:
        """Yield the JSON of a piece's log-probabilities in parts; null where none are wanted."""
        if self._call.wants_logprobs:
            yield from merged_parts(self._style.logprobs(piece))
        else:
            yield "null"


class StreamedAnswer(_StyledAnswer):
    """Server-sent events."""

    def __init__(self, call: Call, style: Style, exchange: Exchange, *, answer_id: RequestId) -> None:
        super().__init__(call, style, exchange, answer_id=answer_id)
        self._created = int(time.time())
        self._head = ""
        self._is_bare = not (call.wants_logprobs or call.wants_token_ids or call.wants_running_usage)
        """Events carry nothing but the text of tokens."""
        self._is_plain = self._is_bare
        """The text of an event goes out as it is."""
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
        self._is_plain = self._is_bare and not self._style.is_parsed
        self._num_prompt_tokens += len(job.prompt_token_ids)
        self._head = (
            f'data: {{"id":{quote(self._id)},"object":"{self._style.chunk_name}","created":{self._created},'
            f'"model":{quote(self._model)},"choices":['
        )

    async def take(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Write an event for each choice that got tokens, in one write."""
        first = position * self._call.num_samples
        if len(delta.tokens) == 1 and self._is_plain:  # nearly always
            token = delta.tokens[0]
            begin = self._text_begins.get(first + token.sample_index)
            if begin is not None and not token.finish_reason:
                await self._exchange.write(f"{begin}{quote(token.text)}{self._text_end}".encode())
                return
        self._prompts.note(position, delta)
        self._num_output_tokens += len(delta.tokens)
        pieces = [
            Piece(index=first + sample, tokens=tokens, prompt=self._prompts.take(position, first + sample))
            for sample, tokens in by_sample(delta).items()
        ]
        parts = chain.from_iterable(map(self._event, pieces))
        await self._exchange.write_parts(parts)

    def finish(self) -> None:
        """Write the requested counts and the end."""
        wants_usage = self._call.wants_usage or self._call.wants_running_usage
        last = ({"usage": usage_of(self.facts.values())} if wants_usage else {}) | self._report()
        extra = f"{self._head}],{quote(last)[1:]}\n\n" if last else ""
        self._exchange.finish((extra + _DONE,))

    def _event(self, piece: Piece) -> Iterator[str]:
        """Yield the events of a piece in parts."""
        style, prompt = self._style, piece.prompt
        choice, opening = f'{self._head}{{"index":{piece.index}', ""
        if piece.index not in self._text_begins:
            self._text_begins[piece.index] = choice + style.text_open
            if style.opening:
                opening = f"{choice}{style.opening}]{self._usage}}}\n\n"
        text = style.event(piece)
        if text is None and self._is_bare:
            yield opening  # what the text means is not certain yet
            return
        finish_reason = style.finish_reason(piece)
        if style.is_parsed and finish_reason and text and text != EMPTY_DELTA:
            # OpenAI's client ends a call with the chunk that ends its choice, but only one that it knew before.
            opening += f'{choice}{text},"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'
            text = EMPTY_DELTA
        yield f'{opening}{choice}{text or EMPTY_DELTA},"logprobs":'
        yield from self._logprobs(piece)
        event = f',"finish_reason":{quote(finish_reason)}'
        outside = self._usage
        if self._call.wants_running_usage:
            outside = f',"usage":{quote(self._running_usage())}'
        if self._call.wants_token_ids:
            event += f',"token_ids":{piece.token_ids}'
            if prompt is not None:
                prompt_ids = f',"prompt_token_ids":{prompt.token_ids.tolist()}'
                if style.prompt_ids_with_choice:
                    event += prompt_ids
                else:
                    outside += prompt_ids
        yield f"{event}}}]{outside}}}\n\n"

    def _running_usage(self) -> dict[str, int]:
        prompt, output = self._num_prompt_tokens, self._num_output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


class GatheredAnswer(_StyledAnswer):
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
            if self._style.is_parsed:
                self._style.read(Piece(index=first + sample_index, tokens=tokens, prompt=None))

    def finish(self) -> None:
        """Send the document."""
        self._exchange.finish_parts(self._document())

    def _document(self) -> Iterator[str]:
        """Yield the document in parts."""
        head = {
            "id": self._id,
            "object": self._style.object_name,
            "created": int(time.time()),
            "model": self._model,
        }
        yield f'{quote(head)[:-1]}, "choices": ['
        told: Prompt | None = None
        for number, (position, index, tokens) in enumerate(self._best()):
            prompt = self._prompts.take(position, index)
            yield ", " if number else ""
            yield from self._choice(Piece(index=index, tokens=tokens, prompt=prompt))
            if not self._style.prompt_ids_with_choice:
                told = told or prompt
        usage = usage_of(self.facts.values(), counts_output=not self._call.wants_only_echo)
        yield "], "
        if told is not None:
            yield from self._about(told)
        yield from members_parts({"usage": usage, **self._report()})

    def _best(self) -> Iterator[tuple[int, int, Sequence[sampling_pb2.SampleToken]]]:
        """Yield request, choice and tokens of the samples that are answered: the most probable ones of each request."""
        num_best = self._call.num_best
        for position in sorted({position for position, _index in self._tokens}):
            samples = [tokens for (of, _index), tokens in sorted(self._tokens.items()) if of == position]
            if num_best < len(samples):
                samples = sorted(samples, key=_mean_logprob, reverse=True)[:num_best]
            for rank, tokens in enumerate(samples):
                yield position, position * num_best + rank, tokens[:0] if self._call.wants_only_echo else tokens

    def _choice(self, piece: Piece) -> Iterator[str]:
        """Yield a choice in parts."""
        choice = {"index": piece.index, **self._style.choice(piece), "finish_reason": self._style.finish_reason(piece)}
        if self._call.wants_token_ids:
            choice["token_ids"] = piece.token_ids
        yield "{"
        if piece.prompt is not None and self._style.prompt_ids_with_choice:
            yield from self._about(piece.prompt)
        yield '"logprobs": '
        yield from self._logprobs(piece)
        yield ", "
        yield from members_parts(choice)

    def _about(self, prompt: Prompt) -> Iterator[str]:
        """Yield the members for what is wanted of a prompt itself in parts, with a comma behind each."""
        if self._call.wants_token_ids:
            yield f'"prompt_token_ids": {prompt.token_ids.tolist()}, '
        if self._call.wants_prompt_logprobs:
            yield '"prompt_logprobs": ['
            yield from joined_parts(self._style.prompt_logprobs(prompt))
            yield "], "


def _mean_logprob(tokens: Sequence[sampling_pb2.SampleToken]) -> float:
    return sum(token.logprobs.chosen.logprob for token in tokens) / len(tokens)
