"""A cluster with TLS on, started as users start it: its doors, its commands, and renewals under running streams."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import psutil
import pytest
from cryptography import x509

from cluster.lifecycle import ClusterInfo, read_info
from cluster.trust import operator_proof
from common.errors import AccessDenied, Unauthenticated, Unreachable
from kvrelay.client import AsyncClient
from tests.builders import expected_tokens, make_request
from tests.e2e.harness import fake_config, standing_cluster

NUM_STREAMS, NUM_TOKENS = 3, 40
LIFETIME_S = 24.0
"""A third of it, the time between renewal and end, has to be enough for a busy machine."""
KEYS = {"a": "key-of-tenant-a-0001", "boss": "key-of-the-operators-01"}


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster with TLS on."""
    folder = tmp_path_factory.mktemp("encrypted")
    router = {"port": 0, "http_port": 0, "local_prefill_max_tokens": 0}
    config = fake_config(step_ms=200.0, tls={"mode": "on", "lifetime_s": LIFETIME_S}, router=router)
    with standing_cluster(folder, config):
        yield folder


def where(folder: Path) -> ClusterInfo:
    info = read_info(folder / "run")
    assert info is not None
    return info


def expires_unix_s(folder: Path) -> float:
    """Return until when the operator's certificate is good: it is renewed together with everybody's."""
    pem = (folder / "run" / "tls" / "operator.pem").read_bytes()
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


@pytest.mark.e2e
async def test_streams_go_on_over_renewals_of_every_certificate(encrypted: Path) -> None:
    info = where(encrypted)
    async with AsyncClient(info.address, tls=info.tls, timeout_s=120) as client:
        before = expires_unix_s(encrypted)
        prompts = [[number + 1] * 20 for number in range(NUM_STREAMS)]
        options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        expected = [expected_tokens(make_request(prompt, block_size=16, **options)) for prompt in prompts]
        while expires_unix_s(encrypted) <= before + LIFETIME_S:  # until they have been renewed twice
            streams = [client.generate(prompt, temperature=0, **options) for prompt in prompts]
            answers = await asyncio.gather(*streams)
            assert [list(answer.samples[0].token_ids) for answer in answers] == expected
    async with AsyncClient(info.address, tls=info.tls, timeout_s=60) as newcomer:
        assert (await newcomer.generate([1, 2, 3], max_tokens=4)).samples


@pytest.mark.e2e
async def test_doors_show_the_clusters_certificate_and_refuse_plain_clients(encrypted: Path) -> None:
    info = where(encrypted)
    assert isinstance(info.tls, str)
    async with AsyncClient(info.address, tls=info.tls, timeout_s=60) as client:
        (http_address,) = info.http_addresses
        trusting = ssl.create_default_context(cafile=info.tls)
        http_client = openai.DefaultAsyncHttpxClient(verify=trusting)
        async with openai.AsyncOpenAI(
            base_url=f"https://{http_address}/v1", api_key="x", http_client=http_client
        ) as ai:
            completion = await ai.completions.create(model="fake", prompt="hello", max_tokens=4, temperature=0)
        assert completion.choices[0].text
        assert (await client.generate("hello", max_tokens=4, temperature=0)).samples[0].text == completion.choices[
            0
        ].text
        for tls in (False, True):  # without TLS, and with the well-known authorities alone
            async with AsyncClient(info.address, tls=tls, timeout_s=10) as stranger:
                with pytest.raises(Unreachable):
                    await stranger.models()
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{http_address}/v1/models")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://{http_address}/v1/models")


@pytest.mark.e2e
async def test_direct_streams_are_encrypted_too(encrypted: Path) -> None:
    info = where(encrypted)
    async with AsyncClient(info.address, tls=info.tls, direct=True, timeout_s=60) as client:
        answer = await client.generate([5] * 20, max_tokens=30, temperature=0, ignore_eos=True)
    request = make_request([5] * 20, max_tokens=30, ignore_eos=True, block_size=16)
    assert list(answer.samples[0].token_ids) == expected_tokens(request)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster without TLS that knows its tenants."""
    folder = tmp_path_factory.mktemp("plain")
    router = {"port": 0, "http_port": 0, "auth": "api_key", "salt_secret": "s" * 32}
    tenants = [
        {"name": "a", "api_keys": [KEYS["a"]]},
        {"name": "bosses", "api_keys": [KEYS["boss"]], "operator": True},
    ]
    with standing_cluster(folder, fake_config(router=router, tenants=tenants)):
        yield folder


@pytest.mark.e2e
async def test_status_of_the_cluster_is_for_operators(plain: Path) -> None:
    info = where(plain)
    unknown = "an-unknown-key"
    for key, error in ((None, Unauthenticated), (unknown, Unauthenticated), (KEYS["a"], AccessDenied)):
        async with AsyncClient(info.address, api_key=key, timeout_s=60) as client:
            with pytest.raises(error):
                await client.status()
    for key in (KEYS["boss"], operator_proof(info.run_dir)):
        async with AsyncClient(info.address, api_key=key, timeout_s=60) as client:
            assert len((await client.status()).workers) == 2
    async with AsyncClient(info.address, api_key=operator_proof(info.run_dir), timeout_s=60) as client:
        with pytest.raises(Unauthenticated):  # it shows the whole cluster
            await client.generate("hello")


@pytest.mark.e2e
async def test_another_user_of_the_machine_is_a_stranger_to_a_cluster_without_tls(plain: Path) -> None:
    """Everything listens on the loopback address; nothing inside answers without a proof of membership."""
    info = where(plain)
    async with AsyncClient(info.address, api_key=KEYS["boss"], timeout_s=60) as client:
        inside = {int(view.address.rpartition(":")[2]) for view in (await client.status()).workers}
    state = json.loads((plain / "run" / "state.json").read_text())
    doors = {int(address.rpartition(":")[2]) for address in (*info.addresses, *info.http_addresses)}
    listening = {
        connection.laddr.port
        for process in state["processes"]
        for connection in psutil.Process(process["identity"]["pid"]).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert inside | doors <= listening
    method = "/kvrelay.v1.WorkerService/DescribeWorker"
    answers = set()
    for port in listening - doors:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            raw: Any = channel.unary_unary(method)
            answers.add(await raw(b"", timeout=60).code())
    # By a door for direct clients: no such service. By a metrics port: no gRPC.
    assert answers <= {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
    }
    assert grpc.StatusCode.UNAUTHENTICATED in answers
