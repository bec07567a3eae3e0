import asyncio
import threading
from typing import Any

import pytest

from common.errors import Cancelled, Overloaded, Unreachable
from kvrelay.client import AsyncClient, Client, RecordedRequest
from kvrelay.v1 import inference_pb2
from tests.client.conftest import Connect
from tests.client.fake_server import LIMIT_S, FakeInference


def told(num_prompt_tokens: int, *, num_dropped: int = 0) -> inference_pb2.RecordTrafficResponse:
    request = inference_pb2.RecordedRequest(
        arrival_s=1.5,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=2.5,
        outcome="completed",
        block_size=16,
        block_keys=(1).to_bytes(8, "little") + (2**63).to_bytes(8, "little"),
    )
    return inference_pb2.RecordTrafficResponse(request=request, num_dropped=num_dropped)


def test_recording_yields_every_request_and_counts_missing_ones(fake: FakeInference, client: Any) -> None:
    fake.traffic = [told(20), told(30, num_dropped=4), inference_pb2.RecordTrafficResponse(num_dropped=5)]
    with client.record(duration_s=2.0) as stream:
        first, second = stream
        assert stream.num_dropped == 5
    assert first == RecordedRequest(
        arrival_s=1.5,
        num_prompt_tokens=20,
        num_output_tokens=2.5,
        outcome="completed",
        block_size=16,
        block_keys=(1, 2**63),
    )
    assert second.num_prompt_tokens == 30
    assert [request.duration_s for request in fake.record_requests] == [2.0]


def test_refused_recording_raises_when_it_should_begin(fake: FakeInference, client: Any) -> None:
    fake.unary_error = Overloaded("4 recordings of this tenant run already")
    with pytest.raises(Overloaded), client.record():
        pass


def test_recording_of_an_unreachable_cluster_raises_unreachable(connect: Connect) -> None:
    with connect("127.0.0.1:1") as client, pytest.raises(Unreachable), client.record():
        pass


def test_recording_that_another_thread_closes_ends(fake: FakeInference, address: str) -> None:
    fake.goes_on_recording = True
    with Client(address) as client, client.record() as stream:
        closer = threading.Thread(target=stream.close)
        closer.start()
        assert list(stream) == []
        closer.join(LIMIT_S)


def test_recording_of_a_client_that_another_thread_closes_is_cancelled(fake: FakeInference, address: str) -> None:
    fake.goes_on_recording = True
    client = Client(address)
    stream = client.record()
    closer = threading.Thread(target=client.close)
    closer.start()
    with pytest.raises(Cancelled):
        list(stream)
    closer.join(LIMIT_S)


async def test_async_recording_that_another_task_closes_ends(fake: FakeInference, address: str) -> None:
    fake.goes_on_recording = True
    async with AsyncClient(address) as client, client.record() as stream:
        reading = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        await stream.aclose()
        assert await asyncio.wait_for(reading, LIMIT_S) is None
