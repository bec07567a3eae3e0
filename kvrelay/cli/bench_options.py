"""Options that the commands of `kvrelay bench` share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.options import DEFAULT_CONFIG

if TYPE_CHECKING:
    from workload.slo import Slo

OBJECTIVES, COUNTED, OUTPUT = "Objectives", "What is counted", "Output"
EXIT_BELOW_BOUND = 3

TtftOption = Annotated[
    float | None,
    typer.Option(
        "--ttft",
        min=0,
        metavar="SECONDS",
        help="From when a request was due to its first token; default: slo.ttft_s of serving.yaml.",
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
        help="Longer prompts may take longer to the first token, in proportion; default: slo.ttft_tokens.",
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
        help="Mean gap between a request's tokens; default: slo.itl_s.",
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


def objectives(config_path: Path, *, ttft_s: float | None, ttft_tokens: int | None, itl_s: float | None) -> "Slo":
    """Return the objectives given, and the configuration's for the others. Raises ConfigError."""
    from common.config import ServingConfig, load_config
    from workload.slo import Slo

    is_default = config_path == DEFAULT_CONFIG and not config_path.exists()
    served = (ServingConfig() if is_default else load_config(config_path)).slo
    return Slo(
        ttft_s=served.ttft_s if ttft_s is None else ttft_s,
        itl_s=served.itl_s if itl_s is None else itl_s,
        ttft_tokens=served.ttft_tokens if ttft_tokens is None else ttft_tokens,
    )
