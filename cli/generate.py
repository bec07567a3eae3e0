"""`kvrelay generate`: one answer, from the cluster or from an engine in this very process."""

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.console import Progress, err, write_text
from cli.options import DEFAULT_CONFIG, ModelOption, Sampling, TimeoutOption, options_from_dataclasses
from cli.render import seconds, stats_lines, throughput
from cli.target import ConnectionOptions
from kvrelay.client import ChatMessage, Client, Prompt, SamplingOptions, Token

if TYPE_CHECKING:
    from common.config import ServingConfig
    from common.sampling import SamplingParams
    from router.reading.codec import Codec
    from worker.inprocess import SampleText

_IN_PROCESS = "In-process"
_overrides = partial(typer.Option, help="Overrides the file.", rich_help_panel=_IN_PROCESS)
_SPIN_COUNT = "1000"
"""How long OpenMP's threads spin for each other, some ten microseconds: beside other programs a thread that has lost
its core comes back late, and one that spins for it in vain keeps the core that it needs. Read when torch is loaded."""
_STDIN = "-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InProcessOptions:
    """Options for an engine in this process."""

    in_process: Annotated[
        bool, typer.Option("--in-process", help="Load the model here, without a cluster.", rich_help_panel=_IN_PROCESS)
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, _overrides("--device")] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"] | None, _overrides("--dtype")] = None
    local_files_only: Annotated[
        bool, typer.Option("--local-files-only", help="Never download a model.", rich_help_panel=_IN_PROCESS)
    ] = False

    def overrides(self, model: str | None) -> dict[str, Any]:
        """Return the `model` keys of the command line; None is no override."""
        only_local = self.local_files_only or None
        return {"id": model, "device": self.device, "dtype": self.dtype, "local_files_only": only_local}


@options_from_dataclasses
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Apply the model's chat template, or continue the text as it is.")
    ] = True,
    model: ModelOption = None,
    show_stats: Annotated[
        bool, typer.Option("--show-stats", "-s", help="Show the cost of the answer, on stderr.")
    ] = False,
    *,
    connection: ConnectionOptions,
    timeout_s: TimeoutOption = None,
    sampling: Sampling,
    local: InProcessOptions,
) -> None:
    """Send one prompt and stream the answer to the terminal.

    \b
    kvrelay generate -p "Why is the sky blue?" --show-stats
    kvrelay generate --raw -p "def fib(n):" --max-tokens 64
    kvrelay generate -p "A haiku" --temperature 0.8 --top-p 0.95 --seed 7
    git diff | kvrelay generate -p - > summary.txt
    kvrelay generate --in-process --model ./my-checkpoint -p "Hello"
    """  # noqa: D301 - \b marks a preformatted block
    text = sys.stdin.read() if prompt == _STDIN else prompt
    source: str | list[ChatMessage] = [ChatMessage(role="user", content=text)] if chat else text
    if local.in_process:
        if connection.address is not None or timeout_s is not None:
            raise typer.BadParameter(
                "cannot take --address or --timeout with --in-process: no server is asked; leave them out"
            )
        config = local_config(connection.config_path, local.overrides(model))
        stats = run_in_process(config, source, sampling.options())
    else:
        if local.device or local.dtype or local.local_files_only:
            raise typer.BadParameter("--device, --dtype and --local-files-only need --in-process")
        with connection.client(timeout_s=timeout_s) as client:
            stats = _run_on_cluster(client, source, sampling.options(), model=model or "")
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


def local_config(config_path: Path, overrides: Mapping[str, Any]) -> "ServingConfig":
    """Return the file's configuration, or the default one, with the command line's `model` keys; None is no override.

    Raises ConfigError.
    """
    from common.config import ServingConfig, load_config, parse_config

    is_default = config_path == DEFAULT_CONFIG and not config_path.exists()
    raw = (ServingConfig() if is_default else load_config(config_path)).model_dump(mode="json")
    raw["model"].update({key: value for key, value in overrides.items() if value is not None})
    return parse_config(raw, source="command line")


def run_in_process(config: "ServingConfig", source: str | Sequence[ChatMessage], options: SamplingOptions) -> list[str]:
    """Load the model here and stream the answer to stdout; returns the lines of statistics.

    Raises KvrelayError, ModelNotFound.
    """
    with Progress() as report:
        report(f"loading model {config.model.id}")
        num_prompt_tokens, answer = in_process(config, source, options)
        report("loaded")
    stamps_s = [time.perf_counter()]
    for piece in answer:
        stamps_s.append(time.perf_counter())
        write_text(piece.text)
    write_text("\n")
    begin_s, *arrivals_s = stamps_s
    num_tokens = len(arrivals_s)
    ttft_s = arrivals_s[0] - begin_s if arrivals_s else None
    tpot_s = (arrivals_s[-1] - arrivals_s[0]) / (num_tokens - 1) if num_tokens > 1 else None
    return [
        f"tokens    prompt {num_prompt_tokens} · output {num_tokens}",
        f"time      TTFT {seconds(ttft_s)} · TPOT {seconds(tpot_s)}",
        f"total     {throughput(num_tokens, stamps_s[-1] - begin_s)}",
    ]


def in_process(
    config: "ServingConfig", source: str | Sequence[ChatMessage], options: SamplingOptions
) -> tuple[int, Iterator["SampleText"]]:
    """Load the model here; return the number of the prompt's tokens and the answer, which is computed as it is read.

    Raises KvrelayError, ModelNotFound.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    from worker.inprocess import LocalEngine

    prompt_ids = _encode(_load_codec(config), source)
    return len(prompt_ids), LocalEngine.load(config).stream(prompt_ids, _sampling_params(options, config))


def _load_codec(config: "ServingConfig") -> "Codec":
    """Return the codec that the router would use, so that both ways see the same tokens."""
    if config.model.engine == "fake":
        from router.reading.codec import ByteCodec

        return ByteCodec()
    from common.model_files import resolve_model

    model_dir = resolve_model(config.model.id, local_files_only=config.model.local_files_only)
    from router.reading.tokenizer import TextCodec  # after the line that tells what to do when the model is not there

    return TextCodec.load(model_dir, chat_template=config.model.chat_template)


def _encode(codec: "Codec", source: str | Sequence[ChatMessage]) -> Sequence[int]:
    if isinstance(source, str):
        return codec.encode_now(source)
    from common.chat_template import Conversation

    conversation = Conversation.plain((message.role, message.content) for message in source)
    encoded = codec.encode_chat_now(conversation, rendered_unix_s=int(time.time()))
    return encoded.token_ids


def _sampling_params(options: SamplingOptions, config: "ServingConfig") -> "SamplingParams":
    from common.sampling import SamplingParams

    given: dict[str, Any] = dict(options)  # of the names that both share
    defaults = {"seed": secrets.randbits(63)}
    if config.router.default_max_tokens is not None:
        defaults["max_tokens"] = config.router.default_max_tokens
    return SamplingParams(**(defaults | given))
