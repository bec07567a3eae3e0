"""Compressed bodies are read within the limit of all bodies, and never on trust."""

import gzip
import json
import zlib

import pytest

from tests.router.fake_worker import pair
from tests.router.fakes import config_with
from tests.router.http.clients import COMPLETIONS, HttpCluster, body_of, fetch, http_cluster

GZIP = {"content-encoding": "gzip"}
HALF = len(body_of()) // 2


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(body_of())),
        ("x-gzip", gzip.compress(body_of())),
        ("GZIP", gzip.compress(body_of()[:HALF]) + gzip.compress(body_of()[HALF:])),
        ("deflate", zlib.compress(body_of())),
        ("identity", body_of()),
    ],
    ids=["gzip", "another name", "two parts", "deflate", "none"],
)
async def test_compressed_body_is_read(http: HttpCluster, encoding: str, body: bytes) -> None:
    headers = {"content-encoding": encoding}
    status, _headers, answer = await fetch(http.port, "POST", COMPLETIONS, body, **headers)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(body_of())[:-9], 400),
        ("gzip", body_of(), 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(body_of()) + b"more", 400),
        ("gzip", gzip.compress(b"") * 200 + gzip.compress(body_of()), 400),
        ("br", body_of(), 415),
        ("gzip, gzip", gzip.compress(gzip.compress(body_of())), 415),
    ],
    ids=["cut", "plain", "empty", "more", "many parts", "brotli", "twice"],
)
async def test_body_that_cannot_be_unpacked_is_refused(
    http: HttpCluster, encoding: str, body: bytes, status: int
) -> None:
    headers = {"content-encoding": encoding}
    found, _headers, answer = await fetch(http.port, "POST", COMPLETIONS, body, **headers)
    assert (found, json.loads(answer)["error"]["type"]) == (status, "invalid_request_error")
    await http.cluster.until_idle()


async def test_small_body_that_unpacks_to_a_large_one_is_too_large() -> None:
    async with http_cluster(*pair(), config=config_with(http_port=0, max_message_mib=1)) as http:
        bomb = gzip.compress(b" " * (64 << 20))
        assert len(bomb) < 1 << 17
        status, _headers, _answer = await fetch(http.port, "POST", COMPLETIONS, bomb, **GZIP)
        assert status == 413
        full = gzip.compress(body_of().ljust(1 << 20))
        assert (await fetch(http.port, "POST", COMPLETIONS, full, **GZIP))[0] == 200
