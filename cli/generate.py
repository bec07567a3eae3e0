"""`kvrelay generate`: one answer, from the cluster or from an engine in this very process."""

import enum
import sys
import time
from typing import Annotated

import typer

from cli.console import err, write_text
from cli.in_process import local_config, run_in_process
from cli.options import (
    DEFAULT_CONFIG,
    AddressOption,
    ApiKeyOption,
    CaOption,
    ConfigOption,
    MaxNewTokensOption,
    ModelOption,
    SeedOption,
    TemperatureOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
    sampling_options,
)
from cli.render import stats_lines
from cli.target import find_cluster
from kvrelay.client import ChatMessage, Client, Prompt, SamplingOptions, Token

_IN_PROCESS = "In-process"
_STDIN = "-"


class Device(enum.StrEnum):
    """Device and threads of an in-process model."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    """Number format of an in-process model."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Apply the model's chat template, or continue the text as it is.")
    ] = True,
    model: ModelOption = None,
    show_stats: Annotated[
        bool, typer.Option("--show-stats", "-s", help="Show the cost of the answer, on stderr.")
    ] = False,
    address: AddressOption = None,
    ca: CaOption = None,
    api_key: ApiKeyOption = None,
    config_path: ConfigOption = DEFAULT_CONFIG,
    timeout_s: TimeoutOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Load the model here, without a cluster.", rich_help_panel=_IN_PROCESS)
    ] = False,
    device: Annotated[
        Device | None, typer.Option("--device", help="Overrides the file.", rich_help_panel=_IN_PROCESS)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Overrides the file.", rich_help_panel=_IN_PROCESS)
    ] = None,
    local_files_only: Annotated[
        bool, typer.Option("--local-files-only", help="Never download a model.", rich_help_panel=_IN_PROCESS)
    ] = False,
) -> None:
    """Send one prompt and stream the answer to the terminal.

    \b
    kvrelay generate -p "Why is the sky blue?" --show-stats
    kvrelay generate --raw -p "def fib(n):" --max-new-tokens 64
    kvrelay generate -p "A haiku" --temperature 0.8 --top-p 0.95 --seed 7
    git diff | kvrelay generate -p - > summary.txt
    kvrelay generate --in-process --model ./my-checkpoint -p "Hello"
    """  # noqa: D301 - \b marks a preformatted block
    text = sys.stdin.read() if prompt == _STDIN else prompt
    source: str | list[ChatMessage] = [ChatMessage(role="user", content=text)] if chat else text
    sampling = sampling_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    if in_process:
        if address is not None or timeout_s is not None:
            raise typer.BadParameter("--address and --timeout make no sense with --in-process")
        overrides = {"id": model, "device": device, "dtype": dtype, "local_files_only": local_files_only or None}
        stats = run_in_process(local_config(config_path, overrides), source, sampling)
    else:
        if device or dtype or local_files_only:
            raise typer.BadParameter("--device, --dtype and --local-files-only need --in-process")
        cluster = find_cluster(address, ca, config_path)
        with Client(cluster.address, **cluster.client_options(api_key), timeout_s=timeout_s) as client:
            stats = _run_on_cluster(client, source, sampling, model=model or "")
    if show_stats:
        for line in stats:
            err.print(line, soft_wrap=True)


def _run_on_cluster(client: Client, source: Prompt, sampling: SamplingOptions, *, model: str) -> list[str]:
    """Stream the answer to stdout; returns the lines of statistics."""
    started_s = time.perf_counter()
    with client.stream(source, model=model, **sampling) as stream:
        for event in stream:
            if isinstance(event, Token):
                write_text(event.text)
        elapsed_s = time.perf_counter() - started_s
        write_text("\n")
        return stats_lines(stream.result(), elapsed_s=elapsed_s)
