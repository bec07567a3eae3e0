from pathlib import Path

import pytest

from cli.generate import local_config
from common.errors import InvalidRequest
from kvrelay.v1 import sampling_pb2
from tests.cli.conftest import FakeLifecycle, Run
from tests.client.fake_server import LIMIT_S, FakeInference, Hold
from tests.client.messages import accepted, completed, remote_plan, tokens


def test_generate_prints_only_the_answer_on_stdout(run: Run, address: str) -> None:
    result = run("generate", "-a", address, "-p", "Hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n"
    assert result.stderr == ""


def test_generate_with_markup_in_the_answer_prints_it_raw(run: Run, fake: FakeInference, address: str) -> None:
    text = "[bold]x[/bold] [/] :smile: a[0]"
    fake.script = [accepted(), remote_plan(), tokens([text], last="stop"), completed()]
    assert run("generate", "-a", address, "-p", "Hi").stdout == text + "\n"


def test_generate_with_stats_tells_the_cost_on_stderr(run: Run, address: str) -> None:
    result = run("generate", "-a", address, "-p", "Hi", "--show-stats")
    assert result.stdout == "Hello world\n"
    assert "remote prefill-0 → decode-0\n          longest prefix\n" in result.stderr
    assert "prompt 5 · cached 3 (on decode 2) · output 2" in result.stderr
    assert "3.0 MiB handed over in 2 blocks by shm · 2.0 ms not hidden" in result.stderr
    assert "queue 1.0 ms · prefill 250 ms · transfer 4.0 ms\n" in result.stderr
    assert "TTFT 300 ms · TPOT 50.0 ms · largest gap 60.0 ms" in result.stderr
    assert "2 tokens in" in result.stderr
    assert "tokens/s · seed 7" in result.stderr


@pytest.mark.parametrize("longest", ["--max-tokens", "--max-new-tokens", "-n"])
def test_generate_sends_the_options_given_and_no_others(
    longest: str, run: Run, fake: FakeInference, address: str
) -> None:
    options = ["--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--seed", "3"]
    run("generate", "-a", address, "-p", "Hi", *options, longest, "8", "--model", "tiny")
    run("generate", "-a", address, "-p", "Hi")
    first, second = fake.generate_requests
    assert first.sampling == sampling_pb2.SamplingParams(temperature=0.5, top_k=4, top_p=0.9, seed=3, max_tokens=8)
    assert first.model == "tiny"
    assert second.sampling == sampling_pb2.SamplingParams(temperature=0)


def test_generate_uses_the_chat_template_unless_raw(run: Run, fake: FakeInference, address: str) -> None:
    run("generate", "-a", address, "-p", "Hi")
    run("generate", "-a", address, "-p", "Hi", "--raw")
    chat, raw = fake.generate_requests
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("user", "Hi")]
    assert raw.text == "Hi"


def test_generate_with_a_dash_reads_the_prompt_from_stdin(run: Run, fake: FakeInference, address: str) -> None:
    run("generate", "-a", address, "--raw", "-p", "-", input="from a pipe")
    assert fake.generate_requests[0].text == "from a pipe"


def test_generate_finds_the_running_cluster(
    run: Run, lifecycle: FakeLifecycle, folder: Path, fake: FakeInference, address: str
) -> None:
    (folder / "serving.yaml").write_text("name: mine\n")
    lifecycle.address = address
    lifecycle.running.add(lifecycle.default_run_dir("mine"))
    assert run("generate", "-p", "Hi").stdout == "Hello world\n"


@pytest.mark.parametrize(
    "command",
    [
        *(("generate", "-p", "a secret"), ("chat",), ("explain",), ("status",), ("why",), ("roofline",)),
        *(("bench", "run", "--rate", "1"), ("bench", "record", "today.jsonl")),
    ],
    ids=" ".join,
)
def test_prompt_and_key_for_a_stopped_cluster_go_nowhere(run: Run, folder: Path, command: tuple[str, ...]) -> None:
    (folder / "mine.yaml").write_text("name: mine\ntls: {mode: on}\n")
    result = run(*command, "--config", "mine.yaml", "--api-key", "k" * 16)
    assert result.exit_code == 1
    assert "no cluster is running for mine.yaml: start it with `kvrelay up --config mine.yaml`" in result.stderr


def test_generate_refused_by_the_server_exits_1_with_the_reason(run: Run, fake: FakeInference, address: str) -> None:
    fake.script = [InvalidRequest("top_p is 0.0; allowed is more than 0", field="sampling.top_p")]
    result = run("generate", "-a", address, "-p", "Hi", "--top-p", "0")
    assert result.exit_code == 1
    assert result.stderr == "kvrelay: top_p is 0.0; allowed is more than 0\n"


def test_generate_with_a_timeout_gives_up(run: Run, fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), Hold()]
    result = run("generate", "-a", address, "-p", "Hi", "--timeout", "0.2")
    assert result.exit_code == 1
    assert "--timeout" in result.stderr


def test_generate_interrupted_cancels_the_request_and_exits_130(
    run: Run, fake: FakeInference, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    fake.script = [accepted(), remote_plan(), tokens(["a"]), Hold()]
    monkeypatch.setattr("cli.generate.write_text", interrupt)
    assert run("generate", "-a", address, "-p", "Hi").exit_code == 130
    assert fake.client_left.wait(LIMIT_S)


@pytest.mark.parametrize(
    "options",
    [
        ("--device", "cpu"),
        ("--dtype", "float32"),
        ("--local-files-only",),
        ("--in-process", "--address", "a:1"),
        ("--in-process", "--timeout", "3"),
        ("--temperature", "-1"),
    ],
)
def test_generate_with_options_that_do_not_fit_is_a_usage_error(run: Run, options: tuple[str, ...]) -> None:
    assert run("generate", "-p", "Hi", *options).exit_code == 2


@pytest.fixture
def fake_engine(folder: Path) -> None:
    text = "model: {engine: fake, max_model_len: 256}\npools: {decode: {num_blocks: 32}}\n"
    (folder / "serving.yaml").write_text(text + "router: {default_max_tokens: 9}\n")


@pytest.mark.usefixtures("fake_engine")
def test_generate_in_process_prints_the_answer_and_the_stats(run: Run) -> None:
    options = ("generate", "--in-process", "--raw", "-p", "AB", "--max-new-tokens", "12", "--seed", "5")
    result = run(*options, "--temperature", "1", "--show-stats")
    assert result.exit_code == 0, result.stderr
    assert "prompt 2 · output" in result.stderr
    assert "TTFT" in result.stderr
    assert "tokens/s" in result.stderr
    assert run(*options, "--temperature", "1").stdout == result.stdout


@pytest.mark.usefixtures("fake_engine")
def test_generate_in_process_takes_limits_from_the_file(run: Run) -> None:
    result = run("generate", "--in-process", "--raw", "-p", "some text", "--show-stats")
    num_output_tokens = int(result.stderr.split("output ")[1].split()[0])
    assert 1 <= num_output_tokens <= 9


def test_generate_in_process_without_a_limit_ends_where_the_pages_end(run: Run, folder: Path) -> None:
    (folder / "serving.yaml").write_text(
        "model: {engine: fake, max_model_len: 4096}\npools: {decode: {num_blocks: 2}}\n"
    )
    result = run("generate", "--in-process", "--raw", "-p", "some text", "--show-stats")
    assert (result.exit_code, "prompt 9 · output" in result.stderr) == (0, True), result.stderr


@pytest.mark.usefixtures("fake_engine")
def test_generate_in_process_applies_the_chat_template_unless_raw(run: Run) -> None:
    chat = run("generate", "--in-process", "-p", "Hi", "--show-stats")
    raw = run("generate", "--in-process", "--raw", "-p", "Hi", "--show-stats")
    assert f"prompt {len('user: Hi') + 1 + len('assistant:')} " in chat.stderr
    assert "prompt 2 " in raw.stderr


@pytest.mark.usefixtures("fake_engine")
def test_generate_in_process_with_a_bad_value_names_it(run: Run) -> None:
    result = run("generate", "--in-process", "--raw", "-p", "Hi", "--top-p", "0")
    assert result.exit_code == 1
    assert "top_p is 0.0" in result.stderr


def test_generate_in_process_without_the_model_says_what_to_do(run: Run, folder: Path) -> None:
    result = run("generate", "--in-process", "-p", "Hi", "--model", "./nowhere", "--device", "cpu")
    assert result.exit_code == 1
    assert "there is no folder nowhere" in result.stderr


def test_local_config_overrides_the_file(folder: Path) -> None:
    path = folder / "mine.yaml"
    path.write_text("model: {id: from-file, dtype: float16}\n")
    config = local_config(path, {"id": None, "device": "cpu", "dtype": None, "local_files_only": True})
    assert (config.model.id, config.model.dtype) == ("from-file", "float16")
    assert (config.model.device, config.model.local_files_only) == ("cpu", True)
