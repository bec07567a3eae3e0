from pathlib import Path
from typing import Any

import pytest

from cli.demo import ask_everything
from cli.demo_prompts import ANSWER_TOKENS, LONG_PROMPT_TOKENS, long_prompt
from common.errors import EngineFault
from kvrelay.v1 import inference_pb2
from tests.cli.conftest import FakeLifecycle, Run
from tests.client.fake_server import FakeInference, hello_world, serving


@pytest.fixture(autouse=True)
def config_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "serving.yaml").write_text("name: mine\nlauncher: ray\nrouter: {port: 50051}\n")
    (folder / "demos").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "demos"))


def test_demo_asks_everything_shows_the_cost_and_stops(
    run: Run, lifecycle: FakeLifecycle, fake: FakeInference, address: str
) -> None:
    lifecycle.address = address
    result = run("demo", "--launcher", "local")
    assert result.exit_code == 0, result.output
    (call,) = lifecycle.ups
    assert lifecycle.downs == [call.run_dir]
    assert not call.run_dir.exists()
    assert call.config.launcher == "local"
    assert call.config.router.port == 0
    assert call.config.name != "mine"
    assert len(fake.generate_requests) == 9
    assert result.stdout.count("remote prefill-0 → decode-0\n            longest prefix\n") == 9
    assert result.stdout.count("Hello world") == 9
    assert "policy predictive" in result.stdout


@pytest.mark.parametrize("has_ray", [True, False])
def test_demo_needs_no_configuration_file(
    run: Run, lifecycle: FakeLifecycle, folder: Path, monkeypatch: pytest.MonkeyPatch, has_ray: bool
) -> None:
    (folder / "serving.yaml").unlink()
    monkeypatch.setattr("cli.demo.find_spec", lambda name: object() if has_ray else None)
    run("demo")
    (call,) = lifecycle.ups
    assert call.config.launcher == ("ray" if has_ray else "local")
    assert call.config.pools.prefill.kv_memory_gib == call.config.pools.decode.kv_memory_gib == 0.5


def test_demo_refuses_a_named_file_that_does_not_exist(run: Run, lifecycle: FakeLifecycle) -> None:
    result = run("demo", "--config", "mine.yaml")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: mine.yaml: cannot be read")
    assert not lifecycle.ups


def test_demo_sends_a_shared_prefix_a_long_prompt_and_a_seed(
    run: Run, lifecycle: FakeLifecycle, fake: FakeInference, address: str
) -> None:
    lifecycle.address = address
    run("demo")
    _, first, second, long, sampled, structured, *_ = fake.generate_requests
    assert first.chat.messages[0] == second.chat.messages[0]
    assert first.chat.messages[1] != second.chat.messages[1]
    assert len(long.chat.messages[0].content.split()) >= LONG_PROMPT_TOKENS
    assert sampled.sampling.HasField("seed")
    assert sampled.sampling.temperature > 0
    assert structured.sampling.structured_outputs


def test_demo_fits_a_hundred_columns_but_for_tables_and_answers(
    run: Run, lifecycle: FakeLifecycle, address: str
) -> None:
    lifecycle.address = address
    lines = [line.rstrip() for line in run("demo").stdout.splitlines()]
    long = [line for line in lines if len(line) > 100 and not set("┃│╇") & set(line)]
    assert not long
    assert any("latency   TTFT" in line for line in lines)


def test_demo_that_fails_stops_the_cluster_and_keeps_its_logs(
    run: Run, lifecycle: FakeLifecycle, fake: FakeInference, address: str
) -> None:
    lifecycle.address = address
    fake.script = [EngineFault("a step failed")]
    result = run("demo")
    assert result.exit_code == 1
    assert "a step failed" in result.stderr
    (call,) = lifecycle.ups
    assert lifecycle.downs == [call.run_dir]
    assert f"its logs stay in {call.run_dir / 'logs'}" in result.stdout


def test_ask_everything_when_one_of_the_concurrent_requests_fails_raises_its_error() -> None:
    class FailsAboutTheMoon(FakeInference):
        def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:
            about_the_moon = "moon" in request.chat.messages[-1].content
            self.script = [EngineFault("a step failed")] if about_the_moon else hello_world()
            return super().Generate(request, context)

    with serving(FailsAboutTheMoon()) as failing, pytest.raises(EngineFault, match="a step failed"):
        ask_everything(failing)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a defect")])
def test_demo_that_cannot_start_stops_what_it_started(run: Run, lifecycle: FakeLifecycle, error: BaseException) -> None:
    lifecycle.up_error = error
    assert run("demo").exit_code != 0
    assert not lifecycle.running
    (run_dir,) = lifecycle.downs
    assert run_dir.exists() == (not isinstance(error, KeyboardInterrupt))


@pytest.mark.parametrize("max_model_len", [200, 1024, 8192])
def test_long_prompt_fits_the_model_and_is_long(max_model_len: int) -> None:
    prompt = long_prompt(lambda text: len(text.split()), max_model_len=max_model_len)
    num_tokens = len(prompt.messages[0].content.split())
    assert num_tokens + ANSWER_TOKENS <= max_model_len
    assert num_tokens >= min(LONG_PROMPT_TOKENS, max_model_len - 200)
