"""A cluster with TLS on, started as users start it: its doors, its commands, and renewals under running streams."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from cryptography import x509

from cluster.lifecycle import ClusterInfo, read_info
from common.errors import Unreachable
from kvrelay.client import AsyncClient
from tests.builders import expected_tokens, make_request
from tests.e2e.harness import fake_config, standing_cluster

pytestmark = pytest.mark.e2e

NUM_STREAMS, NUM_TOKENS = 3, 40
LIFETIME_S = 24.0
"""A third of it, the time between renewal and end, has to be enough for a busy machine."""


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


async def test_direct_streams_are_encrypted_too(encrypted: Path) -> None:
    info = where(encrypted)
    async with AsyncClient(info.address, tls=info.tls, direct=True, timeout_s=60) as client:
        answer = await client.generate([5] * 20, max_tokens=30, temperature=0, ignore_eos=True)
    request = make_request([5] * 20, max_tokens=30, ignore_eos=True, block_size=16)
    assert list(answer.samples[0].token_ids) == expected_tokens(request)
