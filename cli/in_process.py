"""The engine inside this very process: what `kvrelay generate --in-process` runs."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.console import Progress, write_text
from cli.options import DEFAULT_CONFIG
from cli.render import seconds, throughput
from kvrelay.client import ChatMessage, SamplingOptions

if TYPE_CHECKING:
    from common.config import ServingConfig
    from common.sampling import SamplingParams
    from router.codec import Codec


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
    from worker.inprocess import LocalEngine

    with Progress() as report:
        report(f"loading model {config.model.id}")
        prompt_ids = asyncio.run(_encode(_load_codec(config), source))
        engine = LocalEngine.load(config)
        report("loaded")
    stopwatch = Stopwatch()
    for piece in engine.stream(prompt_ids, _sampling_params(options, config)):
        stopwatch.note_token()
        write_text(piece.text)
    write_text("\n")
    return [
        f"tokens    prompt {len(prompt_ids)} · output {stopwatch.num_tokens}",
        f"time      TTFT {seconds(stopwatch.ttft_s)} · ITL mean {seconds(stopwatch.mean_itl_s)}",
        f"total     {throughput(stopwatch.num_tokens, stopwatch.elapsed_s)}",
    ]


class Stopwatch:
    """Latencies of a stream of tokens, as this process sees them."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._started_s
        self.num_tokens = 0

    def note_token(self) -> None:
        """Count a token that has just arrived."""
        self._last_s = time.perf_counter()
        self.num_tokens += 1
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def elapsed_s(self) -> float:
        """Start to last token."""
        return self._last_s - self._started_s

    @property
    def ttft_s(self) -> float | None:
        """Start to first token; None before it."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def mean_itl_s(self) -> float | None:
        """Mean gap between tokens; None with fewer than two."""
        if self._first_s is None or self.num_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (self.num_tokens - 1)


def _load_codec(config: "ServingConfig") -> "Codec":
    """Return the codec that the router would use, so that both ways see the same tokens."""
    if config.model.engine == "fake":
        from router.fake_codec import ByteCodec

        return ByteCodec()
    from common.model_files import resolve_model

    model_dir = resolve_model(config.model.id, local_files_only=config.model.local_files_only)
    from router.tokenizer import TextCodec  # after the line that tells what to do when the model is not there

    return TextCodec.load(model_dir)


async def _encode(codec: "Codec", source: str | Sequence[ChatMessage]) -> Sequence[int]:
    if isinstance(source, str):
        return await codec.encode(source)
    messages = [(message.role, message.content) for message in source]
    encoded = await codec.encode_chat(messages, rendered_unix_s=int(time.time()))
    return encoded.token_ids


def _sampling_params(options: SamplingOptions, config: "ServingConfig") -> "SamplingParams":
    from common.sampling import SamplingParams

    given: dict[str, Any] = dict(options)  # of the names that both share
    defaults = {"max_tokens": config.router.default_max_tokens, "seed": secrets.randbits(63)}
    return SamplingParams(**(defaults | given))
