"""Several routers: an unreachable one is left for the next, which resumes the answer."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from common.errors import InvalidRequest, KvrelayError, Overloaded, Unreachable, WorkerLost
from kvrelay.client import AsyncClient, Client, Event, Generation, Token
from kvrelay.client.failover import Attempts, RouterList
from kvrelay.v1 import inference_pb2
from tests.client.conftest import Connect
from tests.client.fake_server import Drop, FakeInference, Step, hello_world, serving
from tests.client.messages import accepted, completed, remote_plan, tokens

NOBODY = "127.0.0.1:1"
GONE = Unreachable("gone")
Ask = Callable[..., tuple[list[Event], Generation]]


@pytest.fixture
def ask(connect: Connect) -> Ask:
    def ask(addresses: str | Sequence[str], **options: Any) -> tuple[list[Event], Generation]:
        with connect(addresses, timeout_s=60) as client, client.stream("Hi", **options) as stream:
            return list(stream), stream.result()

    return ask


@contextmanager
def two(first: list[Step], second: list[Step]) -> Iterator[tuple[list[str], FakeInference, FakeInference]]:
    one, other = FakeInference(), FakeInference()
    one.script, other.script = first, second
    with serving(one) as first_address, serving(other) as second_address:
        yield [first_address, second_address], one, other


def known(request: inference_pb2.GenerateRequest) -> list[tuple[list[int], bool]]:
    samples = request.resume.samples
    return [(list(struct.unpack(f"<{len(one.tokens) // 4}I", one.tokens)), one.is_finished) for one in samples]


def test_first_router_is_unreachable_then_the_second_answers(ask: Ask, fake: FakeInference, address: str) -> None:
    assert ask([NOBODY, address])[1].text == "Hello world"
    assert ask(f"{NOBODY}, {address}")[1].text == "Hello world"
    assert not fake.generate_requests[0].HasField("resume")


@pytest.mark.parametrize("end", [GONE, Drop()])
def test_connection_or_call_that_breaks_midstream_resumes_after_the_received_tokens(ask: Ask, end: Step) -> None:
    first: list[Step] = [accepted(), remote_plan(), tokens(["a", "b"]), tokens(["c"], first_index=2), end]
    second: list[Step] = [accepted(), remote_plan(), tokens(["d"], first_index=3, last="stop"), completed(4)]
    with two(first, second) as (addresses, _, other):
        events, generation = ask(addresses, temperature=0.7)
    assert [(event.token_index, event.text) for event in events if isinstance(event, Token)] == list(enumerate("abcd"))
    assert (generation.text, generation.samples[0].token_ids) == ("abcd", (100, 101, 102, 103))
    assert len(generation.plans) == 2
    (request,) = other.generate_requests
    assert known(request) == [([100, 101, 102], False)]
    assert (request.resume.fingerprint, request.sampling.seed, request.text) == ("f00d", 7, "Hi")
    assert request.resume.rendered_unix_s == 1_800_000_000
    assert request.sampling.temperature == 0.7


def test_answer_that_a_router_has_shortened_stays_as_short_at_every_other_router(ask: Ask) -> None:
    plan = remote_plan()
    plan.plan.shortened_max_tokens = 9
    second: list[Step] = [accepted(), remote_plan(), tokens(["b"], first_index=1, last="length"), completed(2)]
    with two([accepted(), plan, tokens(["a"]), GONE], second) as (addresses, _, other):
        ask(addresses, max_tokens=50)
    assert {request.sampling.max_tokens for request in other.generate_requests} == {9}


def test_resumed_request_tells_ended_and_empty_samples(ask: Ask) -> None:
    first: list[Step] = [
        *(accepted(), remote_plan()),
        *(tokens(["x"], sample_index=2), tokens(["a", "b"], last="stop"), GONE),
    ]
    second: list[Step] = [
        *(accepted(), remote_plan(), tokens(["p"], sample_index=1, last="length")),
        *(tokens(["y"], sample_index=2, first_index=1, last="stop"), completed()),
    ]
    with two(first, second) as (addresses, _, other):
        generation = ask(addresses, n=3)[1]
    assert [sample.text for sample in generation.samples] == ["ab", "p", "xy"]
    assert known(other.generate_requests[0]) == [([100, 101], True), ([], False), ([100], False)]


def test_answer_without_its_end_gets_it_from_the_next_router(ask: Ask) -> None:
    first: list[Step] = [accepted(), remote_plan(), tokens(["a"], last="stop"), GONE]
    with two(first, [accepted(), completed(1)]) as (addresses, _, _other):
        assert ask(addresses)[1].text == "a"


@pytest.mark.parametrize("error", [Overloaded("full"), WorkerLost("no worker"), InvalidRequest("bad")])
def test_error_of_a_router_that_answers_is_not_retried(ask: Ask, error: KvrelayError) -> None:
    with two([accepted(), error], hello_world()) as (addresses, _, other):
        with pytest.raises(type(error)):
            ask(addresses)
        assert not other.generate_requests


def test_client_stays_with_the_router_that_works(connect: Connect) -> None:
    with two([accepted(), GONE], hello_world()) as (addresses, one, other), connect(addresses) as client:
        for _ in range(3):
            client.generate("Hi")
        assert client.address == addresses[1]
        assert (len(one.generate_requests), len(other.generate_requests)) == (1, 3)


def test_reading_calls_go_to_the_next_router_too(connect: Connect, address: str) -> None:
    with connect([NOBODY, address]) as client:
        assert client.models()[0].name == "tiny"
    with connect([NOBODY, address]) as client:
        assert client.status().router.num_completed == 11
    with connect([NOBODY, address]) as client:
        assert client.tokenize("a b").token_ids == (1, 2)
    with connect([NOBODY, address]) as client:
        assert client.embed("a b").vector == (0.5, -1.0)


def test_answer_that_breaks_off_goes_on_at_the_only_router(ask: Ask, fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"], last="stop"), completed(1)]
    fake.first_script = [accepted(), remote_plan(), Drop()]
    assert ask(address)[1].text == "a"
    fake.first_script = [accepted(), remote_plan(), tokens(["a"], last="stop"), GONE]
    fake.script = [accepted(), completed(1)]
    assert ask(address)[1].text == "a"
    assert known(fake.generate_requests[-1]) == [([100], True)]


@pytest.mark.parametrize(("terms", "num_attempts"), [({}, 1), ({"max_attempts": 3}, 3)])
def test_single_address_that_never_answers_is_tried_once_or_as_often_as_asked(
    connect: Connect, fake: FakeInference, address: str, terms: dict[str, int], num_attempts: int
) -> None:
    fake.script = [GONE]
    with connect(address, **terms) as client, pytest.raises(Unreachable):
        client.generate("Hi")
    assert len(fake.generate_requests) == num_attempts


def test_attempts_try_every_router_at_once_and_then_wait_ever_longer() -> None:
    attempts = Attempts(RouterList(["a", "b"], max_attempts=7))
    waits = []
    for _ in range(6):
        waits.append(attempts.failed(GONE, address=attempts.routers.current))
    assert waits == [0.0, 0.1, 0.0, 0.2, 0.0, 0.4]
    with pytest.raises(Unreachable):
        attempts.failed(GONE, address="a")
    attempts.succeeded()
    assert attempts.failed(GONE, address="a") == 0.0


def test_only_router_is_waited_for_about_nine_seconds_once_it_has_answered() -> None:
    attempts = Attempts(RouterList("a", max_attempts=None))
    attempts.answered()
    waits = [attempts.failed(GONE, address="a") for _ in range(8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    with pytest.raises(Unreachable):
        attempts.failed(GONE, address="a")


@pytest.mark.parametrize("addresses", ["", " , ", []])
def test_no_address_at_all_is_refused(addresses: str | Sequence[str]) -> None:
    with pytest.raises(InvalidRequest, match="no router"):
        Client(addresses)


def test_max_attempts_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        AsyncClient("a:1", max_attempts=0)


async def test_stream_closed_between_two_attempts_starts_none(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), GONE]
    async with AsyncClient(address, max_attempts=1000) as client:
        stream = client.stream("Hi")
        reading = asyncio.create_task(_drain(stream))
        await asyncio.wait((reading,), timeout=0.2)  # somewhere in between: closing may come at any moment
        await stream.aclose()
        await reading
        await client.models()  # the last attempt has come to the server by now
        seen = len(fake.generate_requests)
        await client.models()
        assert len(fake.generate_requests) == seen


async def _drain(stream: AsyncIterator[Event]) -> None:
    async for _ in stream:
        pass
