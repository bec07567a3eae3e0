"""Names of sessions in every door: strange ones are cut or refused by their field, and none reaches another tenant."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from common.block_hash import BlockHashes
from kvrelay.v1 import inference_pb2 as pb
from router.http.responses.body import MAX_LABEL_CHARS
from router.record.sessions import MAX_SESSION_CHARS, Session, Sessions
from tests.router.fake_worker import pair
from tests.router.fakes import Reply, config_with, make_request
from tests.router.http.clients import ASKED, CHAT, COMPLETIONS, MESSAGES, RESPONSES, HttpCluster, http_cluster
from tests.router.test_tenants import KEYS, serving

LONG = "x" * 1_000_000
KEYED = (COMPLETIONS, CHAT, RESPONSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request that has begun."""

    tenant: str
    name: str
    session: Session


@pytest_asyncio.fixture
async def http() -> AsyncIterator[HttpCluster]:
    """A router that recognizes sessions."""
    async with http_cluster(*pair(), config=config_with(http_port=0, retention="sessions")) as running:
        yield running


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Begun]:
    """Return the requests that have begun."""
    seen: list[Begun] = []
    begin = Sessions.begin

    def noted(sessions: Sessions, tenant: str, prompt: BlockHashes, *, name: str = "") -> Session:
        session = begin(sessions, tenant, prompt, name=name)
        seen.append(Begun(tenant=tenant, name=name, session=session))
        return session

    monkeypatch.setattr(Sessions, "begin", noted)
    return seen


def _named(path: str, name: Any) -> dict[str, Any]:
    return ASKED[path] | ({"metadata": {"user_id": name}} if path == MESSAGES else {"prompt_cache_key": name})


@pytest.mark.parametrize("path", [*KEYED, MESSAGES])
async def test_name_of_any_length_and_characters_is_a_name(http: HttpCluster, begun: list[Begun], path: str) -> None:
    longest = LONG[:MAX_LABEL_CHARS] if path == RESPONSES else LONG  # an answer there repeats it
    given = ["mine", "", "\0\n\x7f", "😀" * 300, longest, None]
    for name in given:
        status, _headers, document = await http.post(path, _named(path, name))
        assert status == 200, document
    assert [each.name for each in begun] == [(name or "")[:MAX_SESSION_CHARS] for name in given]


@pytest.mark.parametrize("path", [*KEYED, MESSAGES])
async def test_header_names_the_session_before_the_body(http: HttpCluster, begun: list[Begun], path: str) -> None:
    for header in ("theirs", "a\t" + "x" * 5000):
        status, _headers, document = await http.post(path, _named(path, "mine"), **{"x-session-id": header})
        assert status == 200, document
        assert begun.pop().name == header[:MAX_SESSION_CHARS]


@pytest.mark.parametrize("name", [5, True, ["a"], {"a": 1}])
async def test_name_of_another_type_is_refused_by_its_field_or_does_not_count(
    http: HttpCluster, begun: list[Begun], name: Any
) -> None:
    for path in KEYED:
        status, _headers, document = await http.post(path, _named(path, name))
        assert (status, document["error"]["param"]) == (400, "prompt_cache_key"), document
    status, _headers, document = await http.post(MESSAGES, _named(MESSAGES, name))
    assert (status, [each.name for each in begun]) == (200, [""]), document


async def test_name_over_grpc_is_cut(http: HttpCluster, begun: list[Begun]) -> None:
    request: pb.GenerateRequest = make_request(10)
    request.session_id = LONG
    await http.cluster.read(http.cluster.inference.Generate(request), Reply())
    assert [each.name for each in begun] == [LONG[:MAX_SESSION_CHARS]]


async def test_same_name_of_two_tenants_is_two_sessions(begun: list[Begun]) -> None:
    async with http_cluster(*pair(), config=serving(http_port=0, retention="sessions")) as http:
        for tenant in ("a", "b", "a"):
            key = f"Bearer {KEYS[tenant]}"
            assert (await http.post(CHAT, _named(CHAT, "same"), authorization=key))[0] == 200
    first, other, again = begun
    assert first.session is again.session is not other.session
    assert (first.tenant, other.tenant) == ("a", "b")
