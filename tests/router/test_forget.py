"""An operator lets all workers forget a tenant's blocks; nobody else does, and what is left is named."""

from typing import Any

import pytest

from common.errors import AccessDenied, EngineFault, InvalidRequest, KvrelayError, WorkerLost
from kvrelay.client.requests import credentials
from kvrelay.v1 import inference_pb2 as pb
from tests.router.fake_worker import ROOT, pair
from tests.router.fakes import Reply, TestCluster, make_request, running_cluster
from tests.router.test_tenants import KEYS, serving
from tests.trust import operator_token


async def forget(cluster: TestCluster, tenant: str, *, key: str | None = None, salt: str = "") -> Any:
    """Forget a tenant, as the operator of the host by default."""
    request = pb.ForgetTenantRequest(tenant=tenant, cache_salt=salt)
    return await cluster.ask("ForgetTenant", request, key=key or operator_token())


@pytest.mark.parametrize("salt", ["", "of-a-project"])
async def test_every_worker_forgets_the_blocks_that_the_tenants_requests_have(salt: str) -> None:
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=serving()) as cluster:
        request = make_request(10)
        request.cache_salt = salt
        await cluster.read(cluster.inference.Generate(request, metadata=credentials(KEYS["a"])), Reply())
        forgotten = await forget(cluster, "a", salt=salt)
        (asked,) = prefill.requests
        assert prefill.forgotten == decode.forgotten == [asked.sequence.hash_root]
    assert [each.worker_id for each in forgotten.workers] == ["p0", "d0"]
    assert forgotten.workers[0] == pb.ForgottenWorker(worker_id="p0", num_tier_blocks=7, num_page_blocks=3)


async def test_an_unknown_tenant_is_named_beside_the_known_ones() -> None:
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=serving()) as cluster:
        with pytest.raises(InvalidRequest, match="no tenant 'c'; there is a, b"):
            await forget(cluster, "c")
    assert not prefill.forgotten


async def test_only_operators_forget() -> None:
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=serving(b={"operator": True})) as cluster:
        with pytest.raises(AccessDenied):
            await forget(cluster, "a", key=KEYS["a"])
        with pytest.raises(KvrelayError):
            await forget(cluster, "a", key="key-of-nobody-000000")
        assert not prefill.forgotten
        await forget(cluster, "a", key=KEYS["b"])
    assert len(prefill.forgotten) == 1


async def test_tenants_that_share_the_blocks_are_named() -> None:
    shared = {"share_cache": True}
    async with running_cluster(*pair(), config=serving(a=shared, b=shared)) as cluster:
        assert (await forget(cluster, "a")).sharing_tenants == ["b"]


async def test_workers_that_did_not_forget_say_why() -> None:
    prefill, decode = pair()
    async with running_cluster(prefill, decode) as cluster:
        decode.faults["forget"] = EngineFault("it is broken")
        prefill_says, decode_says = (await forget(cluster, "default")).workers
        assert (prefill_says.trouble, decode_says.trouble.split(":")[0]) == ("", "it is broken")
        assert prefill.forgotten == [ROOT], "without tenants all requests are those of `default`"
        await prefill.die()
        await cluster.until_state("p0", "lost")
        prefill_says, decode_says = (await forget(cluster, "default")).workers
        assert "run it again when it is ready" in prefill_says.trouble
        assert prefill_says.trouble.startswith("lost: ")
        assert decode_says.trouble == ""


async def test_without_a_model_nothing_can_be_named() -> None:
    async with running_cluster() as cluster:
        with pytest.raises(WorkerLost, match="start the workers first"):
            await forget(cluster, "default")
