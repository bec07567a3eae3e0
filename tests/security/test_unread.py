"""Unknown callers make no listener keep state: neither half a request nor unbounded calls."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.trust.anonymous import MOST_OPEN
from kvrelay.v1 import decode_pb2
from tests.router.fake_worker import DECODE, FakeWorker
from tests.router.fakes import running_cluster
from tests.router.test_tenants import KEYS, serving
from tests.security.listeners import listeners

GENERATE = "/kvrelay.v1.InferenceService/Generate"


def half_a_request(channel: grpc.aio.Channel, method: str, **terms: Any) -> Any:
    """Begin a call whose request never comes."""
    return channel.stream_stream(method)(**terms)


async def ended(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(60):
        code: grpc.StatusCode = await call.code()
        return code


@pytest.mark.parametrize("method", ["Generate", "Embed", "Tokenize", "ListModels", "GetClusterStatus", "Explain"])
async def test_call_without_a_key_ends_before_its_request_has_come(method: str) -> None:
    async with (
        running_cluster(FakeWorker("d0", DECODE), config=serving()) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        for metadata in ((), (("authorization", "Bearer key-of-nobody-000000"),)):
            call = half_a_request(channel, f"/kvrelay.v1.InferenceService/{method}", metadata=metadata)
            assert await ended(call) is grpc.StatusCode.UNAUTHENTICATED
        known = half_a_request(channel, GENERATE, metadata=(("authorization", f"Bearer {KEYS['a']}"),), timeout=0.5)
        assert await ended(known) is grpc.StatusCode.DEADLINE_EXCEEDED, "a tenant's is waited for"


async def test_call_without_a_proof_ends_before_its_request_has_come() -> None:
    async with listeners(is_encrypted=False) as target:
        for address, method in (
            (target.worker.address, "PrefillService/Prefill"),
            (target.worker.address, "WorkerService/SetRole"),
            (target.worker.kv_address, "KvTransferService/DescribePages"),
            (target.router.admin_address, "RouterAdminService/SetWorkers"),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                call = half_a_request(channel, f"/kvrelay.v1.{method}")
                assert await ended(call) is grpc.StatusCode.UNAUTHENTICATED


async def requests(*given: Any) -> AsyncIterator[Any]:
    for each in given:
        yield each
    await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["watch", "half a check", "reflection", "half a capability"])
async def test_calls_of_strangers_are_bounded_and_a_new_one_is_always_served(kind: str) -> None:
    async with listeners(is_encrypted=False) as target:
        address = target.doors["direct" if "capability" in kind else "door"]
        async with grpc.aio.insecure_channel(address) as channel:
            health, reflection = health_pb2_grpc.HealthStub(channel), reflection_pb2_grpc.ServerReflectionStub(channel)
            check = health_pb2.HealthCheckRequest()
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            calls: list[Any] = []
            for _ in range(MOST_OPEN + 20):
                match kind:
                    case "watch":
                        calls.append(health.Watch(check))
                        assert (await calls[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
                    case "half a check":
                        calls.append(half_a_request(channel, "/grpc.health.v1.Health/Check"))
                    case "reflection":
                        calls.append(reflection.ServerReflectionInfo(requests(ask)))
                        assert (await calls[-1].read()).list_services_response.service
                    case _:
                        calls.append(half_a_request(channel, "/kvrelay.v1.DirectService/StreamTokens"))
            ends = asyncio.as_completed([ended(call) for call in calls])
            assert {await end for _, end in zip(range(20), ends, strict=False)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert (await health.Check(check, timeout=60)).status == health_pb2.HealthCheckResponse.SERVING
            assert sum(not call.done() for call in calls) >= MOST_OPEN - 1
            for call in calls:
                call.cancel()
            for end in ends:
                await end


async def test_odd_requests_of_strangers_end_with_a_status_that_says_so() -> None:
    async with listeners(is_encrypted=False) as target:
        for address, method, raw in (
            (target.doors["door"], "/grpc.health.v1.Health/Check", b"\xff\xff"),
            (target.doors["door"], "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\xff\xff"),
            (target.doors["direct"], "/kvrelay.v1.DirectService/StreamTokens", b"\xff\xff"),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                ask: Any = channel.unary_stream(method)
                assert await ended(ask(raw)) is grpc.StatusCode.INVALID_ARGUMENT, method
        async with grpc.aio.insecure_channel(target.doors["direct"]) as channel:
            direct: Any = channel.unary_stream("/kvrelay.v1.DirectService/StreamTokens")
            large = direct(bytes(1 << 20))
            assert await ended(large) is grpc.StatusCode.RESOURCE_EXHAUSTED
            unknown = decode_pb2.StreamTokensRequest(capability=b"x").SerializeToString()
            nobody = direct(unknown)
            assert await ended(nobody) is grpc.StatusCode.PERMISSION_DENIED
        async with grpc.aio.insecure_channel(target.doors["door"]) as channel:
            check: Any = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nothing"))
            assert await ended(check) is grpc.StatusCode.NOT_FOUND
