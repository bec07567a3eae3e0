"""`kvrelay bench run`: puts a server under load and tells what its users would have seen."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.bench_measure import Judgement, Output, measure, show
from kvrelay.cli.bench_options import (
    COUNTED,
    OUTPUT,
    CheckOption,
    CoolDownOption,
    ItlOption,
    JsonOption,
    ReportOption,
    TtftOption,
    TtftTokensOption,
    WarmUpOption,
    objectives,
)
from kvrelay.cli.bench_workload import (
    DEFAULT_DURATION_S,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_RATE,
    DEFAULT_THINK_S,
    DEFAULT_TURN_TOKENS,
    Arrivals,
    ContentKind,
    Limits,
    Replay,
    Shape,
    workload_spec,
)
from kvrelay.cli.console import err
from kvrelay.cli.errors import EXIT_INTERRUPTED, CliError
from kvrelay.cli.options import DEFAULT_CONFIG, ApiKeyOption, ConfigOption
from kvrelay.cli.target import find_address

RESULTS = Path("bench-results")
_TARGET, _LOAD, _REQUESTS, _TRACE, _RUN = "Target", "Load", "Requests", "Replay", "Generator"
_LENGTHS = "300, uniform:20,60, normal:300,40, lognormal:MEDIAN,SIGMA, exponential:MEAN; then ,min= and ,max="


def run(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-T",
            metavar="URL",
            envvar="KVRELAY_TARGET",
            help="HOST:PORT of a kvrelay router, or http(s)://HOST[:PORT]/v1 of any OpenAI-compatible server;"
            " default: the cluster that `kvrelay up` started.",
            show_default=False,
            rich_help_panel=_TARGET,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Default: the first one served.", show_default=False, rich_help_panel=_TARGET
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Stream tokens from the decode workers (gRPC).", rich_help_panel=_TARGET)
    ] = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="FILE.yaml",
            help="A workload of several streams (docs/loadtest.md), in place of the options below.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            "-r",
            min=0.0001,
            help=f"Open loop: sessions a second, in the mean; default: {DEFAULT_RATE:g}.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option("--arrivals", help="Default: poisson.", show_default=False, rich_help_panel=_LOAD),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            "--burstiness",
            min=0.001,
            help="Gamma arrivals: 1 is Poisson, below burstier, above more even.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-k",
            min=1,
            help="Closed loop: so many sessions at any time; the load follows the server.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            "--load",
            min=0.0001,
            metavar="RATE",
            help="Scale all arrivals, of a file or a trace too, to so many requests a second in the mean.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "-d",
            min=0.1,
            metavar="SECONDS",
            help=f"No session begins later; default: {DEFAULT_DURATION_S:g}, or as the file or trace has it.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            min=1,
            help="No session begins after so many requests.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            "--prompt-tokens",
            metavar="LENGTH",
            help=f"{_LENGTHS}. Default: {DEFAULT_PROMPT_TOKENS}.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(
            "--output-tokens",
            metavar="LENGTH",
            help=f"Exactly so many are generated. Default: {DEFAULT_OUTPUT_TOKENS}.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(
            "--turns",
            metavar="LENGTH",
            help="Requests of a session, each with all that was said before; default: 1.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    turn_tokens: Annotated[
        str | None,
        typer.Option(
            "--turn-tokens",
            metavar="LENGTH",
            help=f"What later turns add. Default: {DEFAULT_TURN_TOKENS}.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    think: Annotated[
        str | None,
        typer.Option(
            "--think",
            metavar="SECONDS",
            help=f"From an answer to the next turn; also a distribution. Default: {DEFAULT_THINK_S}.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    prefix_tokens: Annotated[
        str | None,
        typer.Option(
            "--prefix-tokens",
            metavar="LENGTH",
            help="Prompts begin with a shared prefix so long, a system prompt.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    prefix_share: Annotated[
        float | None,
        typer.Option(
            "--prefix-share",
            min=0,
            max=1,
            help="So many of the sessions have one; default: 1.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    prefix_count: Annotated[
        int | None,
        typer.Option(
            "--prefix-count",
            min=1,
            help="So many different prefixes; default: 1.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    content: Annotated[
        ContentKind | None,
        typer.Option(
            "--content",
            help="Exact token ids, words, or chat messages; default: tokens.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            help="Same seed, same requests at the same times. Another one keeps caches cold; default: 0.",
            show_default=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            "-t",
            metavar="FILE",
            help="Mooncake (.jsonl), Azure (.csv), or what `kvrelay bench record` wrote.",
            show_default=False,
            rich_help_panel=_TRACE,
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed",
            "-s",
            min=0.0001,
            help="Arrivals so many times faster.",
            show_default=False,
            rich_help_panel=_TRACE,
        ),
    ] = None,
    shrink: Annotated[
        int | None,
        typer.Option("--shrink", min=1, help="Divide all lengths by this.", show_default=False, rich_help_panel=_TRACE),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Only the first requests.", show_default=False, rich_help_panel=_TRACE),
    ] = None,
    ttft: TtftOption = None,
    ttft_tokens: TtftTokensOption = None,
    itl: ItlOption = None,
    check: CheckOption = None,
    warm_up: WarmUpOption = None,
    cool_down: CoolDownOption = None,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            min=0,
            metavar="SECONDS",
            help="So long after the load has ended, what still runs is cancelled.",
            rich_help_panel=COUNTED,
        ),
    ] = 120.0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.001, metavar="SECONDS", help="Of a request, from its sending.", rich_help_panel=COUNTED
        ),
    ] = 600.0,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            help="Exactly so many send; default: one, and more when it gets busy.",
            show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help=f"Results; default: a new folder in {RESULTS}.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            "-l",
            metavar="KEY=VALUE",
            help="Kept with the results; repeatable. name=… names the run.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: JsonOption = False,
    report: ReportOption = True,
) -> None:
    """Put a server under load and measure what its users see.

    \b
    kvrelay bench run                                      one request a second, for a minute
    kvrelay bench run --rate 4 --duration 120 --ttft 0.5 --itl 0.05
    kvrelay bench run -k 16 --turns 6 --prefix-tokens 300  sixteen chats at any time
    kvrelay bench run --trace conversation.jsonl --shrink 16 --load 2
    kvrelay bench run -T http://127.0.0.1:8000/v1 -w chats.yaml --check 0.99

    Requests are sent when they are due, whether or not others have been answered,
    and latencies count from then. Every request is kept in DIR, with a summary and
    a page of plots. Ctrl-C ends the run and keeps what was measured.

    A good request is answered to its end, with its first token and the mean gap
    between its tokens within the objectives; refused and failed ones are not good.
    """  # noqa: D301 - \b marks a preformatted block
    from loadtest.spec import LoadSpec
    from loadtest.targets.interface import TargetSpec
    from workload.build import build_workload

    labels = _labels(label or [])
    specification = workload_spec(
        workload,
        Shape(
            rate=rate,
            arrivals=arrivals,
            burstiness=burstiness,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            turns=turns,
            turn_tokens=turn_tokens,
            think=think,
            prefix_share=prefix_share,
            prefix_tokens=prefix_tokens,
            prefix_count=prefix_count,
        ),
        Replay(trace=trace, speed=speed, shrink=shrink, limit=limit),
        Limits(duration=duration, requests=requests, content=content, seed=seed),
    )
    slo = objectives(config_path, ttft_s=ttft, ttft_tokens=ttft_tokens, itl_s=itl)
    name = labels.pop("name", specification.name)
    spec = LoadSpec(
        name=name,
        target=TargetSpec(url=target or find_address(None, config_path), api_key=api_key, model=model, direct=direct),
        workload=build_workload(specification, load=load),
        specification=specification.model_dump(mode="json", exclude_none=True)
        | ({} if load is None else {"load": load}),
        slo=slo if ttft is not None or itl is not None else None,
        timeout_s=timeout,
        drain_s=drain,
        processes=processes,
        labels=labels,
    )
    folder = out or _new_folder(name)
    measured, was_interrupted = measure(spec, folder)
    err.print(f"Every request is in {folder}; `kvrelay bench report {folder}` judges it anew", soft_wrap=True)
    judgement = Judgement(slo=slo, warm_up_s=warm_up, cool_down_s=cool_down, required_share=check)
    show(measured, judgement, folder, Output(as_json=as_json, with_report=report))
    if was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _labels(texts: Sequence[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise CliError(f"--label: {text!r}; say KEY=VALUE")
        labels[key] = value
    return labels


def _new_folder(name: str) -> Path:
    """Return a folder that does not exist."""
    stem = "".join(character if character.isalnum() or character in "-_." else "-" for character in name)
    folder = RESULTS / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while folder.exists():
        folder = RESULTS / f"{folder.name.partition('~')[0]}~{number}"
        number += 1
    return folder
