"""Options that the commands of `kvrelay bench` share, and how a dataclass becomes options."""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DEFAULT_CONFIG

if TYPE_CHECKING:
    from common.slo import Slo

EXIT_BELOW_BOUND = 3
REQUIRED_SHARE = 0.99
"""Share of good requests that meets the objectives, where `--check` gives no other one."""

objective = functools.partial(typer.Option, show_default=False, rich_help_panel="Objectives")
counted = functools.partial(typer.Option, rich_help_panel="What is counted")
output = functools.partial(typer.Option, rich_help_panel="OutputOptions")

CheckOption = Annotated[
    float | None,
    objective(
        "--check",
        min=0,
        max=1,
        metavar="SHARE",
        help=f"Exit with {EXIT_BELOW_BOUND} when a smaller share of the requests meets both objectives; for CI.",
    ),
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The objectives, and which requests count."""

    slo: "Slo"
    warm_up_s: float | None
    cool_down_s: float | None
    required_share: float | None
    stretch: float
    idle: Path | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """Options by which a run is judged."""

    ttft: Annotated[
        float | None,
        objective(
            "--ttft",
            min=0,
            metavar="SECONDS",
            help="From a request's due time to its first token; default: slo.ttft_s of serving.yaml, or as before.",
        ),
    ] = None
    ttft_tokens: Annotated[
        int | None,
        objective(
            "--ttft-tokens",
            min=1,
            metavar="TOKENS",
            help="Longer prompts may take proportionally longer to the first token; default: likewise.",
        ),
    ] = None
    tpot: Annotated[
        float | None,
        objective("--tpot", min=0, metavar="SECONDS", help="Mean gap between a request's tokens; default: likewise."),
    ] = None
    warm_up: Annotated[
        float | None,
        counted(
            "--warm-up",
            min=0,
            metavar="SECONDS",
            help="Leave out requests due earlier; default: a tenth of the arrivals, at most 60 s.",
            show_default=False,
        ),
    ] = None
    cool_down: Annotated[
        float | None,
        counted(
            "--cool-down",
            min=0,
            metavar="SECONDS",
            help="Leave out this time before the last request; default: all requests after the last session's start.",
            show_default=False,
        ),
    ] = None

    stretch: Annotated[float, objective("--stretch", min=1, help="Stretch within which a session is good.")] = 2.0
    idle: Annotated[
        Path | None,
        objective(
            "--idle",
            metavar="DIR",
            help="A run of the same sessions with --concurrency 1, whose times stretches are relative to.",
            show_default=False,
        ),
    ] = None

    def judgement(self, defaults: "Slo", required_share: float | None = None) -> Judgement:
        """Return what these options ask for; objectives that are not given are those of `defaults`."""
        given = {"ttft_s": self.ttft, "ttft_tokens": self.ttft_tokens, "tpot_s": self.tpot}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Judgement(
            slo=dataclasses.replace(defaults, **changes),
            warm_up_s=self.warm_up,
            cool_down_s=self.cool_down,
            required_share=required_share,
            stretch=self.stretch,
            idle=self.idle,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options for what is shown and written."""

    as_json: Annotated[bool, output("--json", help="Print every field, as JSON.")] = False
    with_report: Annotated[bool, output("--report/--no-report", help="Write a page of plots, report.html.")] = True


def served_objectives(config_path: Path) -> "Slo":
    """Return the configuration's objectives. Raises ConfigError."""
    from common.config import ServingConfig, load_config
    from common.slo import Slo

    is_default = config_path == DEFAULT_CONFIG and not config_path.exists()
    served = (ServingConfig() if is_default else load_config(config_path)).slo
    return Slo(ttft_s=served.ttft_s, tpot_s=served.tpot_s, ttft_tokens=served.ttft_tokens)
