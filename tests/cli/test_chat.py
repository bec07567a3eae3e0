import pytest

from cli import console
from common.errors import PromptTooLong
from tests.cli.conftest import Run
from tests.client.fake_server import LIMIT_S, FakeInference, Hold, hello_world
from tests.client.messages import accepted, remote_plan, tokens


def turns(fake: FakeInference, idx: int) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in fake.generate_requests[idx].chat.messages]


def test_chat_remembers_the_conversation_until_reset(run: Run, fake: FakeInference, address: str) -> None:
    result = run("chat", "-a", address, "--system", "Be short.", input="One\n\nTwo\n/reset\nThree\n/exit\nFour\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n" * 3
    assert turns(fake, 0) == [("system", "Be short."), ("user", "One\n")]
    assert turns(fake, 1) == [*turns(fake, 0), ("assistant", "Hello world"), ("user", "Two\n")]
    assert turns(fake, 2) == [("system", "Be short."), ("user", "Three\n")]
    assert len(fake.generate_requests) == 3


def test_chat_at_the_end_of_input_ends(run: Run, address: str) -> None:
    result = run("chat", "-a", address, "--show-stats", input="One")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n"
    assert "remote prefill-0 → decode-0" in result.stderr


def test_chat_after_a_refused_turn_goes_on_without_it(run: Run, fake: FakeInference, address: str) -> None:
    fake.script = [PromptTooLong("9 tokens; this model takes 8", field="prompt")]
    result = run("chat", "-a", address, input="One\nTwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("9 tokens; this model takes 8") == 2
    assert turns(fake, 1) == [("user", "Two\n")]


def test_chat_interrupted_answer_is_cancelled_and_kept(
    run: Run, fake: FakeInference, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = console.write_text

    def interrupt_after(text: str) -> None:
        write_text(text)
        if text == "part":
            fake.script = hello_world()
            raise KeyboardInterrupt

    fake.script = [accepted(), remote_plan(), tokens(["part"]), Hold()]
    monkeypatch.setattr("cli.chat.write_text", interrupt_after)
    result = run("chat", "-a", address, input="One\nTwo\n")
    assert result.exit_code == 0
    assert result.stdout == "part …\nHello world\n"
    assert fake.client_left.wait(LIMIT_S)
    assert turns(fake, 1) == [("user", "One\n"), ("assistant", "part"), ("user", "Two\n")]
