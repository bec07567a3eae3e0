"""Streams of a worker: tokens in messages, answers kept for direct clients, changes of cached blocks for watchers."""

import asyncio

import msgpack
import pytest

from common.block_hash import BlockHashes
from common.errors import ClientGone, InvalidRequest, KvrelayError, Overloaded
from common.fake_tokenizer import byte_tokenizer
from common.ids import BlockHash
from common.kv_events import KvEvents, decode_events, encode_events
from common.sampling import SamplingParams
from common.wire import unpack_tokens
from common.wire_names import FinishReason
from decode_worker.direct import CAPABILITY_BYTES, DirectAnswer
from engine.events import GeneratedRun, TokenOutput, Tokens
from kvrelay.v1 import decode_pb2
from kvrelay.v1 import sampling_pb2 as pb
from tests.builders import expected_tokens, make_request
from tests.worker.calls import messages as read_messages
from tests.worker.cluster import running_pair
from worker.kv_event_hub import KvEventHub
from worker.output import OutputStreams


def test_take_runs_packs_tokens_and_runs_in_order_and_ends_with_the_last_sample() -> None:
    streams = OutputStreams(make_request([1], n=2, detokenize=False), byte_tokenizer())
    token = TokenOutput(sample_index=0, token_index=0, token_id=7, logprobs=None, finish_reason=FinishReason.STOP)
    run = GeneratedRun(sample_index=1, first_token_index=1, token_ids=(8, 9), finish_reason=None)
    assert streams.take_runs(Tokens(tokens=(token,), runs=(run,))) == [
        pb.TokenRun(tokens=b"\7\0\0\0", finish_reason=pb.FINISH_REASON_STOP),
        pb.TokenRun(sample_index=1, first_token_index=1, tokens=b"\x08\0\0\0\x09\0\0\0"),
    ]
    assert not streams.is_over
    end = GeneratedRun(sample_index=1, first_token_index=3, token_ids=(1,), finish_reason=FinishReason.LENGTH)
    assert [run.finish_reason for run in streams.take_runs(Tokens(runs=(end,)))] == [pb.FINISH_REASON_LENGTH]
    assert streams.is_over


@pytest.mark.parametrize("what", [{"stop": ("x",)}, {"num_logprobs": 0}])
def test_validate_without_text_refuses_options_that_need_text_by_field(what: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="detokenize") as caught:
        SamplingParams(detokenize=False, **what).validate(vocab_size=9)  # type: ignore[arg-type]
    assert caught.value.field == f"sampling.{next(iter(what)).removeprefix('num_')}"


async def test_decode_without_text_streams_runs_of_the_same_tokens() -> None:
    request = make_request(range(9), max_tokens=12, detokenize=False)
    async with running_pair() as pair:
        messages = [message async for message in read_messages(pair.open_decode(request, None))]
        runs = [run for message in messages for run in message.tokens.runs]
        assert not any(message.tokens.tokens for message in messages)
        ids: list[int] = []
        for run in runs:
            assert run.first_token_index == len(ids)
            ids += unpack_tokens(run.tokens, vocab_size=1 << 16, field="")
        assert ids == expected_tokens(request)
        assert runs[-1].finish_reason


async def test_late_client_gets_everything_in_messages_below_the_size_limit() -> None:
    def lose(error: KvrelayError) -> None:
        raise error

    access = decode_pb2.DirectAccess(capability=bytes(CAPABILITY_BYTES), ttl_s=60, checkpoint_tokens=64)
    answer = DirectAnswer(access, range(1), [], lambda _batch: None, lose)
    for index in range(10_000):
        answer.put(decode_pb2.TokenBatch(tokens=[pb.SampleToken(token_index=index)]))
    messages: list[decode_pb2.StreamTokensResponse] = []

    async def write(message: decode_pb2.StreamTokensResponse) -> None:
        messages.append(message)
        if sum(len(each.tokens.tokens) for each in messages) == 10_000:
            answer._is_complete = True  # noqa: SLF001

    await answer.stream([], write)
    answer.close(KvrelayError("over"))
    assert [len(message.tokens.tokens) for message in messages] == [1024] * 9 + [10_000 - 9 * 1024]
    assert [t.token_index for message in messages for t in message.tokens.tokens] == list(range(10_000))


async def test_answer_that_ends_as_its_client_is_given_up_ends_its_call() -> None:
    lost: list[KvrelayError] = []
    access = decode_pb2.DirectAccess(capability=bytes(CAPABILITY_BYTES), ttl_s=0.01, checkpoint_tokens=64)
    answer = DirectAnswer(access, range(1), [], lambda _batch: None, lost.append)
    answer.put(decode_pb2.TokenBatch(tokens=[pb.SampleToken(token_index=0)]))
    while not lost:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.001)
    with pytest.raises(ClientGone):  # its call has ended well meanwhile, and has not heard of it
        await answer.delivered()
    answer.close(KvrelayError("over"))


A, B = BlockHash(b"a" * 16), BlockHash(b"b" * 16)


async def test_watcher_merges_changes_to_the_last_one_of_each_hash() -> None:
    hub = KvEventHub()
    with hub.watch() as watcher:
        hub.publish(KvEvents(stored=BlockHashes.of((A, B))))
        hub.publish(KvEvents(removed=BlockHashes.of((A,))))
        assert await watcher.next_changes() == KvEvents(stored=BlockHashes.of((B,)), removed=BlockHashes.of((A,)))
        hub.publish(KvEvents())
        assert await watcher.next_changes() == KvEvents()


async def test_batch_that_waits_alone_reaches_each_watcher_as_it_came() -> None:
    hub, batch = KvEventHub(), KvEvents(stored=BlockHashes.of((B,)), removed=BlockHashes.of((A, B)))
    with hub.watch() as watcher, hub.watch() as slow:
        hub.publish(batch)
        hub.publish(KvEvents())
        assert await watcher.next_changes() is batch
        hub.publish(KvEvents(removed=BlockHashes.of((B,))))
        assert await watcher.next_changes() == KvEvents(removed=BlockHashes.of((B,)))
        assert await slow.next_changes() == KvEvents(removed=BlockHashes.of((A, B)))
        assert not await slow.next_changes(within_s=0)


async def test_watcher_merges_changes_of_window_pages_since_a_block_was_stored() -> None:
    hub, a, b = KvEventHub(), BlockHashes.of((A,)), BlockHashes.of((B,))
    with hub.watch() as watcher:
        hub.publish(KvEvents(stored=a, paged=a))
        hub.publish(KvEvents(stored=b, unpaged=a))
        assert await watcher.next_changes() == KvEvents(stored=a + b, unpaged=a)
        hub.publish(KvEvents(paged=a + b))
        hub.publish(KvEvents(removed=a, stored=b))
        merged = await watcher.next_changes()
        assert merged == KvEvents(removed=a, stored=b)
        assert decode_events(encode_events(merged)) == merged
        hub.publish(KvEvents(paged=a, unpaged=b))
        merged = await watcher.next_changes()
        assert merged == decode_events(encode_events(merged)) == KvEvents(paged=a, unpaged=b)


async def test_watcher_merges_moves_between_pages_and_tiers_since_a_block_was_stored() -> None:
    hub, a, b = KvEventHub(), BlockHashes.of((A,)), BlockHashes.of((B,))
    with hub.watch() as watcher:
        hub.publish(KvEvents(stored=a + b, offloaded=a))
        hub.publish(KvEvents(stored=a, offloaded=b))
        assert await watcher.next_changes() == KvEvents(stored=a + b, offloaded=b)
        hub.publish(KvEvents(offloaded=a))
        hub.publish(KvEvents(removed=a, offloaded=b))
        merged = await watcher.next_changes()
        assert merged == decode_events(encode_events(merged)) == KvEvents(removed=a, offloaded=b)
        hub.publish(KvEvents(offloaded=a))
        merged = await watcher.next_changes()
        assert merged == decode_events(encode_events(merged)) == KvEvents(offloaded=a)
        assert merged


def test_batch_without_marks_is_sent_as_before_there_were_any() -> None:
    names = {"v", "snap", "add", "del"}
    assert msgpack.unpackb(encode_events(KvEvents(stored=BlockHashes.of((A,))))).keys() == names
    marked = KvEvents(stored=BlockHashes.of((A, B)), offloaded=BlockHashes.of((A,)))
    assert msgpack.unpackb(encode_events(marked)).keys() == {*names, "off"}


async def test_subscription_of_a_slow_watcher_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.kv_event_hub.MAX_PENDING_CHANGES", 1)
    hub = KvEventHub()
    with hub.watch() as slow, hub.watch() as fast:
        hub.publish(KvEvents(stored=BlockHashes.of((A,))))
        assert await fast.next_changes() == KvEvents(stored=BlockHashes.of((A,)))
        hub.publish(KvEvents(stored=BlockHashes.of((B,)), removed=BlockHashes.of((A,))))
        hub.publish(KvEvents(stored=BlockHashes.of((A,))))
        with pytest.raises(Overloaded):
            await slow.next_changes()
        hub.publish(KvEvents(offloaded=BlockHashes.of((A,)), paged=BlockHashes.of((B,))))
        with pytest.raises(Overloaded):
            await fast.next_changes()
