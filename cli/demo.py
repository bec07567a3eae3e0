"""`kvrelay demo`: starts a cluster of its own, sends it some requests, shows the cost of each, stops it again."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cli.console import Progress, out, print_wide, write_text
from cli.demo_prompts import (
    DemoPrompt,
    concurrent_pair,
    copying_question,
    long_prompt,
    plain_question,
    sampled_question,
    shared_prefix_pair,
    structured_question,
)
from cli.generate import in_process
from cli.options import DEFAULT_CONFIG, ConfigOption, Launcher, LauncherOption
from cli.render import AskedRouter, SummaryRow, stats_lines, status_view, summary_table
from common.signals import sigterm_interrupts, uninterrupted
from kvrelay.client import AsyncClient, Client, Token

if TYPE_CHECKING:
    from common.config import ServingConfig
    from common.config.workers import ModelConfig

_LINE_CHARS = 76


def demo(config_path: ConfigOption = DEFAULT_CONFIG, launcher: LauncherOption = None) -> None:
    """Start a cluster, send it a few requests, show the cost of each, stop it.

    Without a file, it serves the default model. The cluster gets a free port
    and a run folder of its own. The demo neither
    needs nor touches a cluster that is already running, and leaves nothing
    behind, even after Ctrl-C; its logs stay only after a failure.
    """
    from cluster import lifecycle
    from common.config import load_config

    run_dir = Path(tempfile.mkdtemp(prefix="kvrelay-demo-"))
    logs_are_wanted = False
    with sigterm_interrupts():
        try:
            is_named = config_path != DEFAULT_CONFIG or config_path.exists()
            config = _demo_config(load_config(config_path) if is_named else _built_in_config(), launcher)
            _title("Starting the cluster")
            with Progress(out) as report:
                info = lifecycle.up(config, config_path=config_path, run_dir=run_dir, report=report)
                report(f"ready at {info.address}")
            rows = ask_everything(info.address)
            _show_results(rows, info.address)
            _show_speculation(config, rows)
        except Exception:
            logs_are_wanted = True
            raise
        finally:
            with uninterrupted():
                _title("Stopping the cluster")
                with Progress(out) as report:
                    lifecycle.down(run_dir, report=report)
                if logs_are_wanted and (run_dir / "logs").is_dir():
                    out.print(f"its logs stay in {run_dir / 'logs'}", soft_wrap=True)
                else:
                    shutil.rmtree(run_dir, ignore_errors=True)


def ask_everything(address: str) -> list[SummaryRow]:
    """Send the demo's requests and stream the answers to stdout. Raises KvrelayError."""
    with Client(address) as client:
        model = client.models()[0]
        prompts = [
            plain_question(),
            *shared_prefix_pair(),
            long_prompt(lambda text: len(client.tokenize(text).token_ids), max_model_len=model.max_model_len),
            sampled_question(),
            structured_question(),
            copying_question(),
        ]
        rows = [_ask(client, prompt) for prompt in prompts]
    return [*rows, *asyncio.run(_ask_together(address, concurrent_pair()))]


def _built_in_config() -> "ServingConfig":
    """Return the configuration of a demo without a file, with Ray where it is installed."""
    from common.config import parse_config

    pool = {"kv_memory_gib": 0.5}
    launcher = "local" if find_spec("ray") is None else "ray"
    return parse_config({"launcher": launcher, "pools": {"prefill": pool, "decode": pool}}, source="the demo")


def _demo_config(config: "ServingConfig", launcher: Launcher | None) -> "ServingConfig":
    """Return the configuration with a free port and a name of its own."""
    router = config.router.model_copy(update={"host": "127.0.0.1", "port": 0, "http_port": 0})
    changes: dict[str, object] = {"name": f"demo-{os.getpid()}", "router": router}
    if config.model.speculation.method == "off":
        changes["model"] = _with_speculation(config.model, "ngram")
    return config.model_copy(update=changes | ({"launcher": launcher} if launcher is not None else {}))


def _with_speculation(model: "ModelConfig", method: str) -> "ModelConfig":
    speculation = model.speculation.model_copy(update={"method": method})
    return model.model_copy(update={"speculation": speculation})


def _ask(client: Client, prompt: DemoPrompt) -> SummaryRow:
    _title(f"{prompt.title} ({prompt.why})")
    out.print(f"> {prompt.shown}", soft_wrap=True)
    started_s = time.perf_counter()
    with client.stream_chat(prompt.messages, **prompt.sampling) as stream:
        for event in stream:
            if isinstance(event, Token):
                write_text(event.text)
        elapsed_s = time.perf_counter() - started_s
        write_text("\n")
        generation = stream.result()
    _print_stats(stats_lines(generation, elapsed_s=elapsed_s))
    return SummaryRow(title=prompt.title, generation=generation)


async def _ask_together(address: str, prompts: Sequence[DemoPrompt]) -> list[SummaryRow]:
    """Send the requests at the same moment, and show each answer when all are there."""
    _title(" and ".join(prompt.title for prompt in prompts))
    started_s = time.perf_counter()
    async with AsyncClient(address) as client:  # when one fails, closing the client cancels the others
        answers = await asyncio.gather(*(client.generate(prompt.messages, **prompt.sampling) for prompt in prompts))
    elapsed_s = time.perf_counter() - started_s
    rows = []
    for prompt, generation in zip(prompts, answers, strict=True):
        out.print(f"> {prompt.shown}", soft_wrap=True)
        write_text(f"{generation.text}\n")
        _print_stats(stats_lines(generation, elapsed_s=elapsed_s))
        rows.append(SummaryRow(title=prompt.title, generation=generation))
    return rows


def _show_results(rows: Sequence[SummaryRow], address: str) -> None:
    _title("Results")
    print_wide(summary_table(rows))
    _title("Pool status")
    with Client(address) as client:
        print_wide(status_view([AskedRouter(address=address, status=client.status())]))


def _show_speculation(config: "ServingConfig", rows: Sequence[SummaryRow]) -> None:
    """Show how many drafts of the copied text were right, and that it is the text of one engine that drafts nothing."""
    prompt = copying_question()
    row = next(row for row in rows if row.title == prompt.title)
    usage = row.generation.usage
    if not usage.num_drafted_tokens:
        return
    num_steps = usage.num_output_tokens - usage.num_accepted_tokens
    _title("Speculation")
    out.print(
        f"{row.title}: {usage.num_accepted_tokens} of {usage.num_drafted_tokens} drafted tokens were right,"
        f" {usage.num_output_tokens / num_steps:.1f} tokens a step",
        soft_wrap=True,
    )
    with Progress(out) as report:
        report("the same request on one engine that drafts nothing")
        # One thread, as the workers beside it have: threads that wait for each other's cores take long.
        decode = config.pools.decode.model_copy(update={"threads": 1})
        pools = config.pools.model_copy(update={"decode": decode})
        plain = config.model_copy(update={"model": _with_speculation(config.model, "off"), "pools": pools})
        _num_prompt_tokens, answer = in_process(plain, prompt.messages, prompt.sampling)
        is_same = tuple(token.token_id for token in answer) == row.generation.token_ids
        report("the same tokens" if is_same else "OTHER TOKENS")


def _title(text: str) -> None:
    out.print(f"\n── {text} ".ljust(_LINE_CHARS, "─"), soft_wrap=True)


def _print_stats(lines: Sequence[str]) -> None:
    for line in lines:
        out.print(f"  {line}", soft_wrap=True)
