import subprocess
import sys
from pathlib import Path

import pytest

from cli.errors import explain
from cli.reference import reference
from common.errors import Overloaded
from tests.cli.conftest import Run
from tests.client.fake_server import FakeInference

COMMANDS = ("up", "down", "status", "logs", "fetch-model", "quantize", "generate", "chat", "demo", "simulate", "trace")


def test_help_lists_every_command(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_it(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: kvrelay {command}" in result.output


def test_import_of_the_command_line_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "ray", "numpy", "pydantic", "yaml", "plotly", "measure.simulate")
    code = f"import sys, cli.main; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.startswith("kvrelay 0.")


def test_unknown_command_is_a_usage_error(run: Run) -> None:
    assert run("serve").exit_code == 2


@pytest.mark.parametrize("arguments", [("status",), ("generate", "-p", "Hi"), ("chat",)])
def test_command_without_a_server_says_what_to_do(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no kvrelay cluster answers at 127.0.0.1:1" in result.stderr
    assert "kvrelay up" in result.stderr
    assert "Traceback" not in result.stderr


def test_overloaded_cluster_says_when_to_come_back(run: Run, fake: FakeInference, address: str) -> None:
    fake.unary_error = Overloaded("the queue is full", retry_after_s=1.5)
    result = run("status", "-a", address)
    assert result.exit_code == 1
    assert "the queue is full\nTry again in 1.5 s." in result.stderr


def test_explain_of_an_unexpected_error_is_none() -> None:
    assert explain(ZeroDivisionError("a defect")) is None
    assert explain(BrokenPipeError()) is None
    assert explain(FileNotFoundError(2, "No such file or directory", "a.yaml")) == "a.yaml: No such file or directory"


_PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_page_of_commands_is_the_declared_one() -> None:
    assert _PAGE.read_text(encoding="utf-8") == reference(), "run `python -m cli.reference docs/commands.md`"


def test_page_of_commands_shows_required_arguments_defaults_and_environment() -> None:
    text = reference()
    assert "| `POOL=N…` | required | prefill=3, decode=2, or both. |" in text
    assert "| `--config FILE`, `-c FILE` (`KVRELAY_CONFIG`) | `serving.yaml` | The configuration file. |" in text
    assert "#### kvrelay bench run\n" in text


def test_page_of_commands_describes_common_options_once() -> None:
    shared, _, commands = reference().partition("\n## Cluster\n")
    assert "| `--grace SECONDS` | `30.0` |" in shared
    assert "| `--grace SECONDS` |" not in commands
    assert "`--grace`" in commands.partition("\n### kvrelay restart\n")[2].partition("\n### ")[0]
