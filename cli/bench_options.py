"""Options that the commands of `kvrelay bench` share."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DEFAULT_CONFIG

if TYPE_CHECKING:
    from common.slo import Slo

OBJECTIVES, COUNTED, OUTPUT = "Objectives", "What is counted", "Output"
EXIT_BELOW_BOUND = 3

TtftOption = Annotated[
    float | None,
    typer.Option(
        "--ttft",
        min=0,
        metavar="SECONDS",
        help="From when a request was due to its first token; default: slo.ttft_s of serving.yaml, or as before.",
        show_default=False,
        rich_help_panel=OBJECTIVES,
    ),
]
TtftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--ttft-tokens",
        min=1,
        metavar="TOKENS",
        help="Longer prompts may take longer to the first token, in proportion; default: likewise.",
        show_default=False,
        rich_help_panel=OBJECTIVES,
    ),
]
ItlOption = Annotated[
    float | None,
    typer.Option(
        "--itl",
        min=0,
        metavar="SECONDS",
        help="Mean gap between a request's tokens; default: likewise.",
        show_default=False,
        rich_help_panel=OBJECTIVES,
    ),
]
CheckOption = Annotated[
    float | None,
    typer.Option(
        "--check",
        min=0,
        max=1,
        metavar="SHARE",
        help=f"Exit with {EXIT_BELOW_BOUND} when fewer of the requests meet both objectives; for CI.",
        show_default=False,
        rich_help_panel=OBJECTIVES,
    ),
]
WarmUpOption = Annotated[
    float | None,
    typer.Option(
        "--warm-up",
        min=0,
        metavar="SECONDS",
        help="Requests due before are left out; default: a tenth of the arrivals, at most 60 s.",
        show_default=False,
        rich_help_panel=COUNTED,
    ),
]
CoolDownOption = Annotated[
    float | None,
    typer.Option(
        "--cool-down",
        min=0,
        metavar="SECONDS",
        help="So much before the last request is left out; default: after the last session has begun.",
        show_default=False,
        rich_help_panel=COUNTED,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print the summary as JSON, not as a table.", rich_help_panel=OUTPUT),
]
ReportOption = Annotated[
    bool, typer.Option("--report/--no-report", help="Write a page of plots, report.html.", rich_help_panel=OUTPUT)
]


def objectives(defaults: "Slo", *, ttft_s: float | None, ttft_tokens: int | None, tpot_s: float | None) -> "Slo":
    """Return the objectives given, and `defaults` for the others."""
    given = {"ttft_s": ttft_s, "ttft_tokens": ttft_tokens, "tpot_s": tpot_s}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(defaults, **changes)


def served_objectives(config_path: Path) -> "Slo":
    """Return the configuration's objectives. Raises ConfigError."""
    from common.config import ServingConfig, load_config
    from common.slo import Slo

    is_default = config_path == DEFAULT_CONFIG and not config_path.exists()
    served = (ServingConfig() if is_default else load_config(config_path)).slo
    return Slo(ttft_s=served.ttft_s, tpot_s=served.tpot_s, ttft_tokens=served.ttft_tokens)
