"""The load target for Anthropic's Messages API, against a scripted server."""

import pytest

from common.errors import EngineFault, InvalidRequest, KvrelayError, Overloaded
from kvrelay.client.chat import ChatMessage
from measure.load.targets.interface import TargetAnswer, TargetRequest, TargetSpec, make_target
from tests.measure.load.sse_server import ScriptedServer, serving

CHAT = (
    ChatMessage(role="user", content="Hi"),
    ChatMessage(role="assistant", content="Yes?"),
    ChatMessage(role="user", content="Go on"),
)


def request(prompt: object = CHAT) -> TargetRequest:
    return TargetRequest(prompt=prompt, num_prompt_tokens=9, num_output_tokens=3, seed=1, timeout_s=60.0)  # type: ignore[arg-type]


async def ask(server: ScriptedServer) -> tuple[TargetAnswer, list[int]]:
    counts: list[int] = []
    async with serving(server):
        target = make_target(TargetSpec(url=f"anthropic+{server.url}", api_key="key"))
        try:
            assert (await target.describe()).model == "m"
            return await target.prepare(request())(counts.append), counts
        finally:
            await target.aclose()


async def test_message_is_asked_for_and_read_with_the_tokens_that_were_cached() -> None:
    server = ScriptedServer()
    answer, counts = await ask(server)
    (body,) = server.bodies
    assert body["messages"] == [{"role": turn.role, "content": turn.content} for turn in CHAT]
    assert (body["max_tokens"], body["stream"], body["model"]) == (3, True, "m")
    assert server.authorizations == ["key"]
    assert answer.text == "t0 t1 t2 "
    assert sum(counts) == 3
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.report.num_cached_tokens) == (7, 3, 2)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (ScriptedServer(refuse_with=(429, {"error": {"message": "later"}})), Overloaded),
        (ScriptedServer(break_after=3), EngineFault),
        (ScriptedServer(error_after=2), EngineFault),
    ],
    ids=["refused", "broken off", "error within"],
)
async def test_message_that_is_not_complete_is_an_error(server: ScriptedServer, expected: type[KvrelayError]) -> None:
    with pytest.raises(expected):
        await ask(server)


@pytest.mark.parametrize("prompt", ["text", (1, 2, 3)])
def test_other_prompts_than_chats_are_refused(prompt: object) -> None:
    target = make_target(TargetSpec(url="anthropic+http://127.0.0.1:1/v1", model="m"))
    with pytest.raises(InvalidRequest, match="give --content chat"):
        target.prepare(request(prompt))
