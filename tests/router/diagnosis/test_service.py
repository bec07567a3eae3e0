"""`Diagnose` through a real router: who may ask, and what it knows of requests that it answered."""

import asyncio
from typing import Any

import pytest

from common.errors import InvalidRequest, KvrelayError
from common.ids import RequestId
from kvrelay.v1 import inference_pb2
from router.diagnosis.service import _terms_of
from router.placement.waits import WaitCause
from tests.router.fake_worker import TIMEOUT_S, full_pair, pair
from tests.router.fakes import TestCluster, make_request, running_cluster
from tests.router.test_tenants import KEYS, serving


async def diagnose(cluster: TestCluster, *, key: str | None = None, **fields: Any) -> inference_pb2.DiagnoseResponse:
    response: inference_pb2.DiagnoseResponse = await cluster.ask(
        "Diagnose", inference_pb2.DiagnoseRequest(**fields), key=key
    )
    return response


async def test_answered_requests_are_in_the_headline_and_each_can_be_asked_for() -> None:
    async with running_cluster(*pair()) as cluster:
        assert (await diagnose(cluster)).headline == "no request was answered in the last 300 s"
        reply = await cluster.generate(make_request(10))
        request_id = reply.messages[0].accepted.request_id
        assert (await diagnose(cluster)).headline.startswith("1 request answered in 300 s: TTFT p50")
        assert (await diagnose(cluster, request_id=request_id)).headline.startswith(f"{request_id}: ")


async def test_requests_that_wait_now_are_told_with_their_tenant_and_what_they_wait_for() -> None:
    prefill, decode = full_pair()
    async with running_cluster(prefill, decode) as cluster:
        replies = await cluster.queue(make_request(10), make_request(10))
        found = await diagnose(cluster)
        assert found.waiting.startswith("2 requests wait in line for up to")
        assert found.waiting.endswith("mostly for a slot and pages on a decode worker")
        (tenant,) = found.tenants
        assert (tenant.tenant, tenant.num_waiting, tenant.num_answered) == ("default", 2, 0)
        decode.set_load(num_free_blocks=64)
        await replies
        assert (await diagnose(cluster)).waiting == ""


async def test_request_that_waited_for_a_worker_says_so() -> None:
    prefill, decode = pair()
    decode.num_refusals = 1
    async with running_cluster(prefill, decode) as cluster:
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until(lambda _router: decode.requests)
        await cluster.until_queued(1)
        decode.set_load(num_free_blocks=40)
        await generating
        (request,) = cluster.router.door.parts.orchestrator.recent.over(TIMEOUT_S)
        assert request.waits[WaitCause.WORKER] > 0
        assert request.prefill_wait_s < request.queue_s


@pytest.mark.parametrize(("fields", "field"), [({"window_s": 1e6}, "window_s"), ({"request_id": "x"}, "request_id")])
async def test_bad_questions_name_their_field(fields: dict[str, Any], field: str) -> None:
    async with running_cluster(*pair()) as cluster:
        with pytest.raises(InvalidRequest) as raised:
            await diagnose(cluster, **fields)
    assert raised.value.field == field


async def test_only_operators_learn_what_all_tenants_do() -> None:
    async with running_cluster(*pair(), config=serving()) as cluster:
        for key in (None, KEYS["a"]):
            with pytest.raises(KvrelayError):
                await diagnose(cluster, key=key)


async def test_slow_requests_are_told_with_the_costs_of_their_plans() -> None:
    async with running_cluster(*pair()) as cluster:
        reply = await cluster.generate(make_request(10))
        chooser = cluster.router.door.parts.chooser
        request_id = RequestId(reply.messages[0].accepted.request_id)
        terms = _terms_of(chooser.decisions, [request_id, RequestId("forgotten")])
        (decision,) = chooser.decisions.newest(1)
        assert terms == {request_id: decision.plan.candidates()[0].terms}
