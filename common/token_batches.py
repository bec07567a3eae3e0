"""Merges token messages that wait for a slow reader: none is lost, and memory stays small."""

from collections.abc import Iterable, Sequence

from common.tokens import num_packed
from kvrelay.v1 import decode_pb2, inference_pb2, sampling_pb2

MAX_GATHERED_TOKENS = 1024
"""Most tokens in one message besides those of one step: about 256 KiB with 20 log-probabilities each, which a router
takes in some milliseconds. gRPC refuses to send a message above its limit, and then ends the call, or the stream that
it shares with others."""


def num_tokens_in(tokens: Sequence[sampling_pb2.SampleToken], runs: Sequence[sampling_pb2.TokenRun]) -> int:
    """Return the number of tokens in a batch."""
    return len(tokens) + sum(num_packed(run.tokens) for run in runs)


def merge_tokens(
    into: decode_pb2.TokenBatch | inference_pb2.TokenDelta,
    tokens: Sequence[sampling_pb2.SampleToken],
    runs: Sequence[sampling_pb2.TokenRun],
) -> None:
    """Append tokens and runs to an unsent message. Merges a sample's runs into one, 4 bytes a token.

    Copies; only `into` changes.
    """
    if tokens:
        append = into.tokens.append  # half the cost of extend for the usual single token
        for token in tokens:
            append(token)
    for run in runs:
        before = next((known for known in into.runs if known.sample_index == run.sample_index), None)
        if before is None:
            into.runs.append(run)
        else:
            before.tokens += run.tokens
            before.finish_reason = run.finish_reason


def merge_batch(into: decode_pb2.TokenBatch, batch: decode_pb2.TokenBatch) -> None:
    """Append a batch to an unsent one. Copies; only `into` changes."""
    merge_tokens(into, batch.tokens, batch.runs)
    into.num_drafted_tokens += batch.num_drafted_tokens
    into.num_accepted_tokens += batch.num_accepted_tokens
    into.num_pinned_tokens += batch.num_pinned_tokens


def runs_of(tokens: Iterable[sampling_pb2.SampleToken]) -> list[sampling_pb2.TokenRun]:
    """Return each token as a separate run, without its text."""
    return [
        sampling_pb2.TokenRun(
            sample_index=token.sample_index,
            first_token_index=token.token_index,
            tokens=token.token_id.to_bytes(4, "little"),
            finish_reason=token.finish_reason,
        )
        for token in tokens
    ]
