"""`/v1/embeddings`, as OpenAI's own client calls it and as any other client may."""

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from common.errors import EngineFault
from common.wire import MAX_PROMPTS
from tests.router.embeddings import MEAN, unit
from tests.router.fake_service import HIDDEN_SIZE, hidden_of
from tests.router.fake_worker import PREFILL, FakeWorker, sent_prompt
from tests.router.fakes import config_with, prompt_of
from tests.router.http.clients import HttpCluster, fetch, head, http_cluster, sent

PATH = "/v1/embeddings"


async def posted(http: HttpCluster, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Send a body; return the status and the document."""
    status, _headers, document = await http.post(PATH, {"input": prompt_of(10), **fields})
    return status, document


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_openais_client_reads_every_encoding(http: HttpCluster, options: Any) -> None:
    texts = ["one", "three two one", "two"]
    reply = await http.client.embeddings.create(model="fake", input=texts, **options)
    assert [item.index for item in reply.data] == [0, 1, 2]
    vectors: list[Any] = [item.embedding for item in reply.data]
    if options.get("encoding_format") == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
    assert vectors == [unit(list(text.encode())) for text in texts]
    num_tokens = sum(map(len, texts))
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == ("fake", num_tokens, num_tokens)
    assert (await http.cluster.until_idle()).num_completed == 3


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("abc", [[97, 98, 99]]),
        (["abc", "d"], [[97, 98, 99], [100]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2, 3], [4]], [[1, 2, 3], [4]]),
    ],
)
async def test_input_comes_as_text_or_tokens_alone_or_in_lists(http: HttpCluster, given: Any, prompts: Any) -> None:
    _status, document = await posted(http, input=given)
    assert [item["embedding"] for item in document["data"]] == [unit(prompt) for prompt in prompts]
    assert {item["object"] for item in document["data"]} | {document["object"]} == {"embedding", "list"}
    sent_there = [sent_prompt(request.sequence) for request in http.cluster.prefill.requests]
    assert sorted(sent_there) == sorted(prompts)


async def test_extension_fields_say_what_the_vector_is(http: HttpCluster) -> None:
    prompt = prompt_of(10)
    _status, document = await posted(http, pooling="mean", dimensions=3, priority=-1, user="u", encoding_format=None)
    assert document["data"][0]["embedding"] == unit(prompt, MEAN, 3)
    _status, document = await posted(http, pooling="mean", normalize=False)
    assert document["data"][0]["embedding"] == hidden_of(prompt, MEAN).tolist()


async def test_report_names_the_worker_of_each_input(http: HttpCluster) -> None:
    _status, document = await posted(http, input=["a", "b"], kvrelay={"report": True, "ttft_s": 100})
    reports = document["kvrelay"]["requests"]
    assert [report["plans"][0]["kind"] for report in reports] == ["prefill", "prefill"]
    assert {report["plans"][0]["prefill_worker_id"] for report in reports} == {"p0"}
    assert [report["usage"]["num_prompt_tokens"] for report in reports] == [1, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], "a"]}, "input[1]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [[1], [2, 1.5]]}, "input[1][1]"),
        ({"input": [1, 256]}, "input"),
        ({"input": prompt_of(200)}, "input"),
        ({"input": ["a"] * (MAX_PROMPTS + 1)}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"dimensions": 1 << 40}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"priority": 1 << 40}, "priority"),
        ({"kvrelay": {"timeout_s": 0}}, "kvrelay.timeout_s"),
        ({"kvrelay": {"ttft_s": -1.0}}, "kvrelay.ttft_s"),
        ({"kvrelay": {"unknown": 1}}, "kvrelay.unknown"),
        ({"dimension": 1}, "dimension"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:30],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_input_is_refused_by_field(shared_http: HttpCluster, fields: dict[str, Any], param: str) -> None:
    status, document = await posted(shared_http, **fields)
    assert (status, document["error"]["param"]) == (400, param), document
    await shared_http.cluster.until_idle()


async def test_inputs_run_side_by_side_and_one_that_fails_ends_the_call() -> None:
    worker = FakeWorker("p0", PREFILL)
    worker.gates.close("first_token")
    async with http_cluster(worker, config=config_with(http_port=0, max_attempts=1)) as http:
        call = asyncio.create_task(posted(http, input=["a", "b", "c"]))
        await http.cluster.until(lambda _router: worker.num_running_calls >= 3)
        worker.faults["first_token"] = EngineFault("step")
        worker.gates.open("first_token")
        assert (await call)[0] == 500
        await http.cluster.until_idle()


async def test_client_that_leaves_cancels_all_inputs() -> None:
    worker = FakeWorker("p0", PREFILL)
    worker.gates.close("first_token")
    body = json.dumps({"input": ["a", "b", "c"]}).encode()
    async with http_cluster(worker) as http:
        async with sent(http, head("POST", PATH, len(body)) + body):
            await http.cluster.until(lambda _router: worker.num_running_calls >= 3)
        await http.until_responses(PATH, 499)
        assert (await http.cluster.until_idle()).num_cancelled == 3
        assert worker.calls["cancelled"] == 3


async def test_deadline_of_the_body_ends_the_call() -> None:
    worker = FakeWorker("p0", PREFILL)
    worker.gates.close("first_token")
    async with http_cluster(worker) as http:
        status, document = await posted(http, kvrelay={"timeout_s": 0.2})
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        await http.cluster.until_idle()


async def test_embeddings_are_answered_where_nothing_can_be_generated() -> None:
    async with http_cluster(FakeWorker("p0", PREFILL)) as http:
        assert (await posted(http))[0] == 200
        assert (await fetch(http.port, "GET", "/health"))[0] == 503
        models = json.loads((await fetch(http.port, "GET", "/v1/models"))[2])
        assert [model["id"] for model in models["data"]] == ["fake"]
