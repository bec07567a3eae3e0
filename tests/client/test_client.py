"""Both clients: every call, its answer, its errors, and what closing does. `client` is one and then the other."""

import threading
import time
from typing import Any

import pytest

from common.errors import Cancelled, DeadlineExceeded, EngineFault, InvalidRequest, Overloaded, Unreachable, WorkerLost
from kvrelay.client import (
    Accepted,
    Client,
    Completed,
    Event,
    FinishReason,
    PlanChosen,
    PlanKind,
    ServiceTerms,
    Token,
)
from kvrelay.v1.inference_pb2 import EmbedRequest
from kvrelay.v1.sampling_pb2 import POOLING_LAST, POOLING_MEAN
from tests.client.conftest import Connect
from tests.client.fake_server import LIMIT_S, FakeInference, Hold, hello_world
from tests.client.messages import accepted, completed, local_plan, remote_plan, tokens


def test_generate_returns_the_whole_answer(client: Any) -> None:
    generation = client.generate([1, 2, 3], max_tokens=2)
    assert generation.request_id == "req-1"
    assert generation.text == "Hello world"
    assert generation.token_ids == (100, 101)
    assert generation.finish_reason is FinishReason.STOP
    assert (generation.plan.kind, generation.plan.prefill_worker_id) == (PlanKind.REMOTE, "prefill-0")
    assert (generation.usage.num_cached_tokens, generation.usage.num_decode_cached_tokens) == (3, 2)
    assert generation.timings.ttft_s == 0.3
    transfer = generation.transfer
    assert (transfer.kv_bytes, transfer.num_blocks, transfer.transport) == (3 << 20, 2, "shm")
    assert generation.seed == 7


@pytest.mark.parametrize(("key", "sent"), [("secret-key-0123456", "Bearer secret-key-0123456"), (None, None)])
def test_api_key_goes_out_with_every_call(
    connect: Connect, fake: FakeInference, address: str, key: str | None, sent: str | None
) -> None:
    with connect(address, api_key=key) as client:
        client.generate("Hi")
    assert fake.authorization == sent


def test_stream_yields_typed_events_in_order(client: Any) -> None:
    events = list(client.stream("Hi"))
    assert [type(event) for event in events] == [Accepted, PlanChosen, Token, Token, Completed]
    assert [event.text for event in events if isinstance(event, Token)] == ["Hello", " world"]
    assert [event.finish_reason for event in events if isinstance(event, Token)] == [None, FinishReason.STOP]


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_stream_result_holds_events_that_were_taken_before(client: Any, num_taken: int) -> None:
    with client.stream("Hi") as stream:
        for _ in range(num_taken):
            next(stream)
        generation = stream.result()
    assert (generation.text, generation.usage.num_output_tokens) == ("Hello world", 2)


def test_generate_with_two_samples_keeps_them_apart(fake: FakeInference, client: Any) -> None:
    fake.script = [
        accepted(),
        local_plan(),
        tokens(["a"], sample_index=1),
        tokens(["x"], sample_index=0),
        tokens(["b"], sample_index=1, first_index=1, last="length"),
        tokens(["y"], sample_index=0, first_index=1, last="stop"),
        completed(num_output_tokens=4),
    ]
    generation = client.generate("Hi", n=2)
    assert [(sample.text, sample.finish_reason.value) for sample in generation.samples] == [
        ("xy", "stop"),
        ("ab", "length"),
    ]
    assert generation.plan.prefill_worker_id is None
    assert fake.generate_requests[0].sampling.n == 2


def test_generate_after_a_lost_worker_reports_both_plans(fake: FakeInference, client: Any) -> None:
    fake.script = [
        accepted(),
        remote_plan(),
        tokens(["a"]),
        remote_plan(attempt=2),
        tokens(["b"], first_index=1, last="stop"),
        completed(num_attempts=2),
    ]
    generation = client.generate("Hi")
    assert [plan.attempt for plan in generation.plans] == [1, 2]
    assert generation.text == "ab"


def test_chat_and_stream_chat_send_the_conversation(fake: FakeInference, client: Any) -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    assert client.chat(turns).text == "Hello world"
    assert client.chat("Hi").text == "Hello world"
    assert [event.text for event in client.stream_chat("Hi") if isinstance(event, Token)] == ["Hello", " world"]
    sent = [[(turn.role, turn.content) for turn in asked.chat.messages] for asked in fake.generate_requests]
    assert sent == [[("system", "Be short."), ("user", "Hi")], [("user", "Hi")], [("user", "Hi")]]


def test_close_of_a_stream_cancels_on_the_server(fake: FakeInference, client: Any) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"]), Hold()]
    stream = client.stream("Hi")
    next(stream)
    stream.close()
    assert fake.client_left.wait(LIMIT_S)
    assert list(stream) == []
    with pytest.raises(Cancelled):
        stream.result()


@pytest.mark.parametrize("max_attempts", [None, 3])
def test_close_of_the_client_by_another_thread_ends_its_streams_with_cancelled(
    fake: FakeInference, address: str, max_attempts: int | None
) -> None:
    fake.script = [accepted(), Hold()]
    client = Client(address, max_attempts=max_attempts)
    stream = client.stream("Hi")
    next(stream)
    closing = threading.Thread(target=client.close)
    closing.start()
    with pytest.raises(Cancelled):
        stream.result()
    closing.join(LIMIT_S)
    assert fake.client_left.wait(LIMIT_S)


def test_break_out_of_a_stream_cancels_on_the_server(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"]), Hold()]
    with Client(address) as client:
        for event in client.stream("Hi"):
            if isinstance(event, Token):
                break
        assert fake.client_left.wait(LIMIT_S)


def test_close_from_another_thread_ends_the_iteration(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), Hold()]
    with Client(address) as client:
        stream = client.stream("Hi")
        assert isinstance(next(stream), Accepted)
        rest: list[Event] = []
        reader = threading.Thread(target=lambda: rest.extend(stream))
        reader.start()
        stream.close()
        reader.join(LIMIT_S)
        assert not reader.is_alive()
        assert rest == []
        assert fake.client_left.wait(LIMIT_S)


def test_timeout_of_a_call_raises_deadline_exceeded_and_cancels(fake: FakeInference, client: Any) -> None:
    fake.script = [accepted(), Hold()]
    client.models()  # connects: the call comes to the server within its time
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.generate("Hi", timeout_s=1.0)
    assert time.monotonic() - started_s < LIMIT_S
    assert fake.client_left.wait(LIMIT_S)


def test_timeout_of_the_client_is_the_default_of_its_calls(connect: Connect, fake: FakeInference, address: str) -> None:
    with connect(address, timeout_s=50) as client:
        client.generate("Hi")
        assert fake.time_remaining_s is not None
        assert 40 < fake.time_remaining_s < 60
        client.generate("Hi", timeout_s=500)
        assert 400 < fake.time_remaining_s < 600


def test_invalid_request_names_the_field(fake: FakeInference, client: Any) -> None:
    fake.script = [InvalidRequest("top_p is 0.0", field="sampling.top_p")]
    with pytest.raises(InvalidRequest) as caught:
        client.generate("Hi", top_p=0.0)
    assert (caught.value.field, caught.value.message) == ("sampling.top_p", "top_p is 0.0")


def test_overloaded_has_the_time_to_retry(fake: FakeInference, client: Any) -> None:
    fake.script = [Overloaded("the queue is full", retry_after_s=1.5)]
    fake.unary_error = Overloaded("busy", retry_after_s=2)
    calls = (client.models, client.status, lambda: client.tokenize("a"), client.explain, lambda: client.generate("Hi"))
    for call, retry_after_s in zip(calls, (2, 2, 2, 2, 1.5), strict=True):
        with pytest.raises(Overloaded) as caught:
            call()
        assert caught.value.retry_after_s == retry_after_s


def test_worker_lost_in_the_middle_is_not_mistaken_for_a_lost_router(fake: FakeInference, client: Any) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"]), WorkerLost("decode-0 went away")]
    stream = client.stream("Hi")
    with pytest.raises(WorkerLost, match="decode-0 went away"):
        list(stream)
    assert list(stream) == []


def test_call_without_a_server_raises_unreachable_with_the_address(connect: Connect) -> None:
    with connect("127.0.0.1:1") as client:
        for call in (client.status, lambda: client.tokenize("Hi"), lambda: client.generate("Hi")):
            with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
                call()


def test_oversized_request_is_invalid_not_overloaded(client: Any) -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        client.generate("x" * (2 << 20))


def test_stream_that_ends_early_raises_engine_fault(fake: FakeInference, client: Any) -> None:
    fake.script = hello_world()[:-1]
    with pytest.raises(EngineFault, match="before the answer was complete"):
        client.generate("Hi")


@pytest.mark.parametrize("first_index", [0, 2])
def test_repeated_or_missing_token_raises_engine_fault(fake: FakeInference, client: Any, first_index: int) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"]), tokens(["b"], first_index=first_index), Hold()]
    with pytest.raises(EngineFault, match=f"token {first_index} arrived after 1"):
        client.generate("Hi")
    assert fake.client_left.wait(LIMIT_S)


def test_embedding_is_a_record_of_what_was_asked_for(fake: FakeInference, client: Any) -> None:
    terms = ServiceTerms(priority=2, ttft_s=1.5)
    embedding = client.embed([1, 2, 3], pooling="mean", normalize=False, dimensions=2, model="tiny", terms=terms)
    assert (embedding.vector, embedding.request_id, embedding.model) == ((0.5, -1.0), "req-e", "tiny")
    assert (embedding.usage.num_prompt_tokens, embedding.timings.e2e_s, embedding.num_attempts) == (3, 0.5, 1)
    assert [(plan.kind, plan.prefill_worker_id) for plan in embedding.plans] == [(PlanKind.PREFILL, "prefill-0")]
    (request,) = fake.embed_requests
    assert (list(request.token_ids.ids), request.pooling, request.normalize) == ([1, 2, 3], POOLING_MEAN, False)
    assert (request.dimensions, request.priority, request.objective.ttft_s) == (2, 2, 1.5)


def test_embedding_of_text_leaves_the_defaults_to_the_server(fake: FakeInference, client: Any) -> None:
    client.embed("Hi")
    assert fake.embed_requests == [EmbedRequest(text="Hi", pooling=POOLING_LAST)]


def test_tokenize_models_and_status_return_records(fake: FakeInference, client: Any) -> None:
    tokenization = client.tokenize([{"role": "user", "content": "Hi"}])
    assert (tokenization.token_ids, tokenization.pieces) == ((1, 2), ("a", "b"))
    assert fake.tokenize_requests[0].chat.messages[0].content == "Hi"
    (model,) = client.models()
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 2048, 512)
    status = client.status()
    assert (status.router.policy, status.router.num_completed) == ("predictive", 11)
    prefill, decode = status.workers
    assert prefill.role == "prefill"
    assert prefill.status is not None
    assert prefill.status.load.num_free_blocks == 60
    assert prefill.status.num_leases == 1
    assert (decode.role, decode.state, decode.status) == ("decode", "lost", None)


def test_explain_returns_decisions_with_none_for_unknown_values(fake: FakeInference, client: Any) -> None:
    complete, running = client.explain("req-1", limit=5)
    client.explain()
    assert [(asked.request_id, asked.limit) for asked in fake.explain_requests] == [("req-1", 5), ("", 20)]
    assert (complete.plan.kind, complete.plan.prefill_worker_id, complete.num_tokens) == ("remote", "prefill-0", 1000)
    remote, local = complete.candidates
    assert (remote.source_worker_id, remote.cost, remote.terms) == ("decode-0", 0.5, {"queue": 0.125, "prefill": 0.375})
    assert (local.kind, local.prefill_worker_id, local.source_worker_id) == ("local", None, None)
    outcome = complete.outcome
    assert (outcome.num_cached_tokens, outcome.ttft_s, outcome.tpot_s) == (608, 0.625, 0.03)
    assert outcome.ended == "completed"
    unknown = running.outcome
    assert (unknown.num_cached_tokens, unknown.ttft_s, unknown.tpot_s, unknown.ended) == (None, None, None, None)


def test_one_client_serves_many_threads(address: str) -> None:
    texts: list[str] = []
    with Client(address) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.generate("Hi").text)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert texts == ["Hello world"] * 4
