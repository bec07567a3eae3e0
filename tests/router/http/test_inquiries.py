"""Endpoints that generate nothing."""

import asyncio
import json
from typing import Any

import pytest

from tests.router.fakes import DECODE, PREFILL, TIMEOUT_S, FakeWorker
from tests.router.http.clients import HttpCluster, fetch, http_cluster


async def ask(http: HttpCluster, method: str, path: str, **fields: Any) -> Any:
    status, _headers, body = await fetch(http.port, method, path, json.dumps(fields).encode() if fields else b"")
    assert status == 200, body
    return json.loads(body)


async def test_models_are_those_that_workers_told() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        (model,) = (await ask(http, "GET", "/v1/models"))["data"]
        assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
            *("fake", "model", "kvrelay"),
            200,
        )
        assert model["vocab_size"] == 256
        assert await ask(http, "GET", "/v1/models/fake") == model


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        told = await ask(http, "POST", "/tokenize", prompt="hé", return_token_strs=True)
        assert told == {
            "count": 3,
            "max_model_len": 200,
            "tokens": [104, 195, 169],
            "token_strs": ["h", "\ufffd", "\ufffd"],
        }
        assert await ask(http, "POST", "/detokenize", tokens=told["tokens"]) == {"prompt": "hé"}
        chat = await ask(http, "POST", "/tokenize", messages=[{"role": "user", "content": "hi"}])
        assert bytes(chat["tokens"]) == b"user: hi\nassistant:"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [256]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_tokens_of_nothing_sensible_are_refused(path: str, fields: dict[str, Any]) -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        assert (await fetch(http.port, "POST", path, json.dumps(fields).encode()))[0] == 400


async def test_health_version_and_metrics_are_told() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        assert await ask(http, "GET", "/health") == {"status": "ok"}
        assert set(await ask(http, "GET", "/version")) == {"version"}
        _status, headers, body = await fetch(http.port, "GET", "/metrics")
        assert headers["content-type"].startswith("text/plain")
        assert b"kvrelay_workers_ready 1.0" in body
        assert await http.num_responses("/health", 200) == 1


async def test_tokens_without_a_worker_are_unavailable() -> None:
    async with http_cluster() as http:
        assert (await fetch(http.port, "POST", "/tokenize", b'{"prompt": "a"}'))[0] == 503


async def test_health_follows_the_workers_and_live_does_not() -> None:
    decode = FakeWorker("d0", DECODE)
    async with http_cluster(FakeWorker("p0", PREFILL)) as http, asyncio.timeout(TIMEOUT_S):

        async def answers(path: str) -> tuple[int, bytes]:
            status, _headers, body = await fetch(http.port, "GET", path)
            return status, body

        status, body = await answers("/health")
        assert (status, json.loads(body)["error"]["message"]) == (503, "no decode worker is ready")
        await decode.start()
        await http.cluster.set_workers(decode)
        while (await answers("/health"))[0] != 200:
            pass
        await decode.die()
        while (await answers("/health"))[0] != 503:
            pass
        assert await answers("/live") == (200, b'{"status": "ok"}')


async def test_health_of_a_router_that_sends_clients_elsewhere_is_bad() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        http.cluster.router.door.is_leaving = True
        assert (await fetch(http.port, "GET", "/health"))[0] == 503
        assert (await fetch(http.port, "GET", "/live"))[0] == 200
