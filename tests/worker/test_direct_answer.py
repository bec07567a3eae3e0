"""What a worker keeps for a client that streams by itself."""

from common.errors import KvrelayError
from decode_worker.direct import CAPABILITY_BYTES, DirectAnswer
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1 import sampling_pb2


async def test_client_that_comes_late_gets_everything_in_messages_that_can_be_sent() -> None:
    def lose(error: KvrelayError) -> None:
        raise error

    access = pb.DirectAccess(capability=bytes(CAPABILITY_BYTES), ttl_s=60, checkpoint_tokens=64)
    answer = DirectAnswer(access, range(1), lambda _batch: None, lose)
    for index in range(10_000):
        answer.put(pb.TokenBatch(tokens=[sampling_pb2.SampleToken(token_index=index)]))
    messages: list[pb.StreamTokensResponse] = []

    async def write(message: pb.StreamTokensResponse) -> None:
        messages.append(message)
        if sum(len(each.tokens.tokens) for each in messages) == 10_000:
            answer._is_complete = True  # noqa: SLF001

    await answer.stream([], write)
    answer.close(KvrelayError("over"))
    assert [len(message.tokens.tokens) for message in messages] == [4096, 4096, 10_000 - 2 * 4096]
    assert [t.token_index for message in messages for t in message.tokens.tokens] == list(range(10_000))
