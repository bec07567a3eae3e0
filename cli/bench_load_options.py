"""Options of `kvrelay bench run`: what is asked of whom, and when."""

from pathlib import Path
from typing import Annotated

import typer

from cli.bench_options import COUNTED, OUTPUT
from cli.bench_workload import (
    DEFAULT_DURATION_S,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_RATE,
    DEFAULT_THINK_S,
    DEFAULT_TURN_TOKENS,
    Arrivals,
    ContentKind,
)

RESULTS = Path("bench-results")
_TARGET, _LOAD, _REQUESTS, _TRACE, _RUN = "Target", "Load", "Requests", "Replay", "Generator"
_LENGTHS = "300, uniform:20,60, normal:300,40, lognormal:MEDIAN,SIGMA, exponential:MEAN; then ,min= and ,max="

TargetOption = Annotated[
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
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Default: the first one served.", show_default=False, rich_help_panel=_TARGET),
]
DirectOption = Annotated[
    bool, typer.Option("--direct", help="Stream tokens from the decode workers (gRPC).", rich_help_panel=_TARGET)
]
WorkloadOption = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="FILE.yaml",
        help="A workload of several streams (docs/loadtest.md), in place of the options below.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        "--rate",
        "-r",
        min=0.0001,
        help=f"Open loop: sessions a second, in the mean; default: {DEFAULT_RATE:g}.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
ArrivalsOption = Annotated[
    Arrivals | None,
    typer.Option("--arrivals", help="Default: poisson.", show_default=False, rich_help_panel=_LOAD),
]
BurstinessOption = Annotated[
    float | None,
    typer.Option(
        "--burstiness",
        min=0.001,
        help="Gamma arrivals: 1 is Poisson, below burstier, above more even.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "-k",
        min=1,
        help="Closed loop: so many sessions at any time; the load follows the server.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
LoadOption = Annotated[
    float | None,
    typer.Option(
        "--load",
        min=0.0001,
        metavar="RATE",
        help="Scale all arrivals, of a file or a trace too, to so many requests a second in the mean.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
DurationOption = Annotated[
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
]
RequestsOption = Annotated[
    int | None,
    typer.Option(
        "--requests",
        "-n",
        min=1,
        help="No session begins after so many requests.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
PromptTokensOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens",
        metavar="LENGTH",
        help=f"{_LENGTHS}. Default: {DEFAULT_PROMPT_TOKENS}.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
OutputTokensOption = Annotated[
    str | None,
    typer.Option(
        "--output-tokens",
        metavar="LENGTH",
        help=f"Exactly so many are generated. Default: {DEFAULT_OUTPUT_TOKENS}.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
TurnsOption = Annotated[
    str | None,
    typer.Option(
        "--turns",
        metavar="LENGTH",
        help="Requests of a session, each with all that was said before; default: 1.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
TurnTokensOption = Annotated[
    str | None,
    typer.Option(
        "--turn-tokens",
        metavar="LENGTH",
        help=f"What later turns add. Default: {DEFAULT_TURN_TOKENS}.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
ThinkOption = Annotated[
    str | None,
    typer.Option(
        "--think",
        metavar="SECONDS",
        help=f"From an answer to the next turn; also a distribution. Default: {DEFAULT_THINK_S}.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
PrefixTokensOption = Annotated[
    str | None,
    typer.Option(
        "--prefix-tokens",
        metavar="LENGTH",
        help="Prompts begin with a shared prefix so long, a system prompt.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
PrefixShareOption = Annotated[
    float | None,
    typer.Option(
        "--prefix-share",
        min=0,
        max=1,
        help="So many of the sessions have one; default: 1.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
PrefixCountOption = Annotated[
    int | None,
    typer.Option(
        "--prefix-count",
        min=1,
        help="So many different prefixes; default: 1.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
ContentOption = Annotated[
    ContentKind | None,
    typer.Option(
        "--content",
        help="Exact token ids, words, or chat messages; default: tokens.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        help="Same seed, same requests at the same times. Another one keeps caches cold; default: 0.",
        show_default=False,
        rich_help_panel=_REQUESTS,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        "-t",
        metavar="FILE",
        help="Mooncake (.jsonl), Azure (.csv), or what `kvrelay bench record` wrote.",
        show_default=False,
        rich_help_panel=_TRACE,
    ),
]
SpeedOption = Annotated[
    float | None,
    typer.Option(
        "--speed",
        "-s",
        min=0.0001,
        help="Arrivals so many times faster.",
        show_default=False,
        rich_help_panel=_TRACE,
    ),
]
ShrinkOption = Annotated[
    int | None,
    typer.Option("--shrink", min=1, help="Divide all lengths by this.", show_default=False, rich_help_panel=_TRACE),
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Only the first requests.", show_default=False, rich_help_panel=_TRACE),
]
DrainOption = Annotated[
    float,
    typer.Option(
        "--drain",
        min=0,
        metavar="SECONDS",
        help="So long after the load has ended, what still runs is cancelled.",
        rich_help_panel=COUNTED,
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.001, metavar="SECONDS", help="Of a request, from its sending.", rich_help_panel=COUNTED
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Exactly so many send; default: one, and more when it gets busy.",
        show_default=False,
        rich_help_panel=_RUN,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help=f"Results; default: a new folder in {RESULTS}.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        "-l",
        metavar="KEY=VALUE",
        help="Kept with the results; repeatable. name=… names the run.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
