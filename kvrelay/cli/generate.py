"""`kvrelay generate`: one answer, from the cluster or from an engine in this very process."""

import enum
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.console import Progress, err, write_text
from kvrelay.cli.options import (
    DEFAULT_CONFIG,
    AddressOption,
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
from kvrelay.cli.render import seconds, stats_lines, throughput
from kvrelay.cli.target import find_address
from kvrelay.client import ChatMessage, Client, Prompt, SamplingOptions, Token

if TYPE_CHECKING:
    from common.config import ServingConfig
    from common.sampling import SamplingParams

_IN_PROCESS = "In-process"
_STDIN = "-"


class Device(enum.StrEnum):
    """Where an in-process model computes."""

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
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask; '-' reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Apply the model's chat template, or continue the text as it is.")
    ] = True,
    model: ModelOption = None,
    show_stats: Annotated[
        bool, typer.Option("--show-stats", "-s", help="Tell what the answer cost, on stderr.")
    ] = False,
    address: AddressOption = None,
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
    """Ask once and stream the answer to the terminal.

    \b
    kvrelay generate -p "Why is the sky blue?" --show-stats
    kvrelay generate --raw -p "def fib(n):" --max-new-tokens 64
    kvrelay generate -p "A haiku" --temperature 0.8 --top-p 0.95 --seed 7
    git diff | kvrelay generate -p - > summary.txt
    kvrelay generate --in-process --model ./my-checkpoint -p "Hello"
    """
    text = sys.stdin.read() if prompt == _STDIN else prompt
    sampling = sampling_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    source: Prompt = [ChatMessage(role="user", content=text)] if chat else text
    if not in_process:
        if device or dtype or local_files_only:
            raise typer.BadParameter("--device, --dtype and --local-files-only need --in-process")
        with Client(find_address(address, config_path), timeout_s=timeout_s) as client:
            _run_on_cluster(client, source, sampling, model=model or "", stats=Stats.of(show_stats))
        return
    if address is not None or timeout_s is not None:
        raise typer.BadParameter("--address and --timeout make no sense with --in-process")
    overrides = {"id": model, "device": device, "dtype": dtype, "local_files_only": local_files_only or None}
    config = _local_config(config_path, {key: value for key, value in overrides.items() if value is not None})
    _run_in_process(config, source, sampling, stats=Stats.of(show_stats))
