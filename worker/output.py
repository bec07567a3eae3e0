"""Turns engine tokens into messages for clients: text deltas, stop strings and finish reasons, or bare token ids."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import tokenizers

from common.token_batches import MAX_GATHERED_TOKENS
from common.tokens import as_tokens
from common.wire import pack_tokens
from common.wire_names import FinishReason
from engine.beams import BeamSnapshot
from engine.events import TokenOutput, Tokens
from engine.executor import Logprobs
from engine.request import EngineRequest
from engine.text.streaming import TextStream
from kvrelay.v1 import decode_pb2, prefill_pb2, sequence_pb2
from kvrelay.v1 import sampling_pb2 as pb

FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class OutputStreams:
    """The text of all samples of one request. A text delta is a pure function of the tokens before it.

    A worker that takes over a request primes its streams with the tokens so far, and continues exactly where the other
    one stopped. A request without text has no streams. Event loop only.
    """

    def __init__(self, request: EngineRequest, tokenizer: tokenizers.Tokenizer) -> None:
        self._samples = range(request.first_sample_index, request.first_sample_index + request.sampling.n)
        self._streams: dict[int, TextStream] = {}
        self._over: set[int] = set()
        self.has_text = request.sampling.detokenize
        for sample_index in self._samples if self.has_text else ():
            stream = TextStream(
                tokenizer,
                stop=request.sampling.stop,
                include_special_tokens=request.sampling.include_special_tokens,
                answer_format=request.answer_format,
            )
            stream.prime(request.output_token_ids)
            self._streams[sample_index] = stream

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended."""
        return len(self._over) == len(self._samples)

    def skip(self, sample_index: int, token_id: int) -> None:
        """Skip a sample's first token, which another worker has delivered."""
        if self.has_text:
            self._streams[sample_index].prime([token_id])

    def end(self, sample_index: int) -> None:
        """Record that a sample ended at another worker."""
        self._over.add(sample_index)

    def take(self, outputs: Iterable[TokenOutput]) -> tuple[list[pb.SampleToken], list[int]]:
        """Return the messages for new tokens, and the samples that a stop string has ended and the engine must end."""
        messages: list[pb.SampleToken] = []
        stopped_here: list[int] = []
        for output in outputs:
            if output.sample_index in self._over:
                continue  # computed before the engine ended the sample
            text, reason = self._text(output)
            if reason is not None:
                self._over.add(output.sample_index)
                if output.finish_reason is None:
                    stopped_here.append(output.sample_index)
            messages.append(
                pb.SampleToken(
                    sample_index=output.sample_index,
                    token_index=output.token_index,
                    token_id=output.token_id,
                    text=text,
                    logprobs=logprobs_to_proto(output.logprobs) if output.logprobs is not None else None,
                    finish_reason=FINISH_REASONS[reason],
                )
            )
        return messages, stopped_here

    def take_runs(self, event: Tokens) -> list[pb.TokenRun]:
        """Return the messages for an event's tokens. Only for requests without text."""
        assert not self.has_text, "a run of tokens has no text"
        tokens = [
            (o.sample_index, o.token_index, o.token_id.to_bytes(4, "little"), o.finish_reason) for o in event.tokens
        ]
        runs = [(r.sample_index, r.first_token_index, pack_tokens(r.token_ids), r.finish_reason) for r in event.runs]
        return [self._run(*run) for run in tokens + runs]

    def _run(self, sample_index: int, first_token_index: int, tokens: bytes, end: FinishReason | None) -> pb.TokenRun:
        if end is not None:
            self._over.add(sample_index)
        return pb.TokenRun(
            sample_index=sample_index,
            first_token_index=first_token_index,
            tokens=tokens,
            finish_reason=FINISH_REASONS[end],
        )

    def _text(self, output: TokenOutput) -> tuple[str, FinishReason | None]:
        if not self.has_text:
            return "", output.finish_reason
        stream = self._streams[output.sample_index]
        if output.finish_reason is FinishReason.STOP:  # the token is the stop, and has no text
            return stream.flush(), FinishReason.STOP
        delta = stream.push(output.token_id)
        if delta.stopped:
            return delta.text, FinishReason.STOP
        if output.finish_reason is not None:
            return delta.text + stream.flush(), output.finish_reason
        return delta.text, None


def repeat_output(request: EngineRequest, tokenizer: tokenizers.Tokenizer) -> list[decode_pb2.TokenBatch]:
    """Return the tokens that a request begins with as another worker has sent them, without log-probabilities.

    Each batch fits a message.
    """
    index, token_ids = request.first_sample_index, request.output_token_ids
    if not token_ids:
        return []
    if not request.sampling.detokenize:
        return [decode_pb2.TokenBatch(runs=[pb.TokenRun(sample_index=index, tokens=pack_tokens(token_ids))])]
    streams = OutputStreams(replace(request, output_token_ids=as_tokens(())), tokenizer)
    outputs = [
        TokenOutput(sample_index=index, token_index=position, token_id=token_id, logprobs=None, finish_reason=None)
        for position, token_id in enumerate(token_ids)
    ]
    messages, _ = streams.take(outputs)
    firsts = range(0, len(messages), MAX_GATHERED_TOKENS)
    return [decode_pb2.TokenBatch(tokens=messages[first : first + MAX_GATHERED_TOKENS]) for first in firsts]


def logprobs_to_proto(logprobs: Logprobs) -> pb.PositionLogprobs:
    """Return the message."""
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def beams_to_proto(snapshot: BeamSnapshot) -> sequence_pb2.BeamState:
    """Return the message; `worker.request` reads it."""
    live = [sequence_pb2.Beam(tokens=pack_tokens(beam.token_ids), score=beam.logprob) for beam in snapshot.live]
    complete = [
        sequence_pb2.Beam(tokens=pack_tokens(each.token_ids), score=each.score, has_end=each.has_end)
        for each in snapshot.complete
    ]
    return sequence_pb2.BeamState(live=live, complete=complete)


def fill_prompt_logprobs(
    into: decode_pb2.TokenBatch | prefill_pb2.PrefillFinished, entries: Sequence[Logprobs]
) -> Iterator[None]:
    """Add one message per prompt position; the first is empty, because nothing precedes it.

    Yields after each position: all of a long prompt take some 100 ms, so the caller lets others run in between.
    """
    positions = into.prompt_logprobs
    if entries:
        positions.add()
    for entry in entries:
        positions.append(logprobs_to_proto(entry))
        yield
