"""Fields that no server would read are left out and named in a header; misspelt ones of ours are refused."""

import json
from typing import Any

import pytest

from tests.router.http.clients import ASKED, CHAT, HttpCluster, fetch

pytestmark = pytest.mark.asyncio(loop_scope="module")
TURN = ASKED[CHAT]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *ASKED.items(),
    ("/v1/messages/count_tokens", {"messages": TURN["messages"]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [65]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_unknown_field_is_left_out_and_named(shared_http: HttpCluster, path: str, body: dict[str, Any]) -> None:
    status, headers, _answer = await shared_http.post(path, body)
    assert (status, "warning" in headers) == (200, False)
    more = {"top_a": 0.3, "provider": {"only": []}, "null_one": None}
    status, headers, _answer = await shared_http.post(path, body | more)
    assert (status, headers["warning"]) == (200, '299 kvrelay "left out: top_a, provider"')


async def test_warning_holds_no_text_that_could_be_taken_for_a_header(shared_http: HttpCluster) -> None:
    names = {'a"\r\nset-cookie: x=y': 1, "é" * 200: 1} | {f"unknown_{number}": 1 for number in range(9)}
    status, headers, _answer = await shared_http.post(CHAT, TURN | names)
    assert status == 200
    assert headers["warning"].startswith(f'299 kvrelay "left out: a???set-cookie??x?y, {"?" * 64}, unknown_0, ')
    assert headers["warning"].endswith('unknown_5 and 3 more"')


async def test_unknown_members_of_options_are_named_by_their_place(shared_http: HttpCluster) -> None:
    more = {"stream": True, "stream_options": {"include_timing": True}}
    _status, headers, _events = await fetch(shared_http.port, "POST", CHAT, json.dumps(TURN | more).encode())
    assert headers["warning"] == '299 kvrelay "left out: stream_options.include_timing"'


@pytest.mark.parametrize(("path", "body"), REQUESTS[:4])
@pytest.mark.parametrize("name", ["kvrelays", "kvrelay.reports", "temperatur"])
async def test_misspelt_field_is_refused(shared_http: HttpCluster, path: str, body: dict[str, Any], name: str) -> None:
    outer, _, inner = name.partition(".")
    status, _headers, answer = await shared_http.post(path, body | {outer: {inner: 1}})
    assert (status, answer["error"]["param"]) == (400, name)
