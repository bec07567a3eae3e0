"""Token messages that wait for a slow reader become one: nothing is dropped, and little is held."""

from collections.abc import Iterable, Sequence

from kvrelay.v1 import decode_pb2, inference_pb2, sampling_pb2


def merge_tokens(
    into: decode_pb2.TokenBatch | inference_pb2.TokenDelta,
    tokens: Sequence[sampling_pb2.SampleToken],
    runs: Sequence[sampling_pb2.TokenRun],
) -> None:
    """Append tokens and runs to a message that has not been sent. A sample's runs become one, 4 bytes a token.

    Copies; `into` alone changes.
    """
    if tokens:
        append = into.tokens.append  # for one token, which it mostly is, half the price of extend
        for token in tokens:
            append(token)
    for run in runs:
        before = next((known for known in into.runs if known.sample_index == run.sample_index), None)
        if before is None:
            into.runs.append(run)
        else:
            before.tokens += run.tokens
            before.finish_reason = run.finish_reason


def runs_of(tokens: Iterable[sampling_pb2.SampleToken]) -> list[sampling_pb2.TokenRun]:
    """Return each token as a run of its own, without its text."""
    return [
        sampling_pb2.TokenRun(
            sample_index=token.sample_index,
            first_token_index=token.token_index,
            tokens=token.token_id.to_bytes(4, "little"),
            finish_reason=token.finish_reason,
        )
        for token in tokens
    ]
