"""Options that several commands share."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from cli.errors import CliError
from kvrelay.client import SamplingOptions

DEFAULT_CONFIG = Path("serving.yaml")
_SAMPLING = "Sampling"


class Launcher(enum.StrEnum):
    """How processes are started."""

    RAY = "ray"
    LOCAL = "local"


ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", envvar="KVRELAY_CONFIG", help="The configuration file.")
]
LauncherOption = Annotated[
    Launcher | None,
    typer.Option("--launcher", help="Ray actors or plain subprocesses; overrides the file.", show_default=False),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="HOST:PORT[,…]",
        envvar="KVRELAY_ADDRESS",
        help="Router, or several with commas; default: the cluster that `kvrelay up` started, else 127.0.0.1:50051.",
        show_default=False,
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        envvar="KVRELAY_CA",
        help="Connect by TLS to routers that these authorities certify; default: that of the run folder, if any.",
        show_default=False,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="KVRELAY_API_KEY",
        help="API key of the caller, for clusters with tenants; better set in the environment.",
        show_default=False,
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Deadline of the call.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Name of a served model; with --in-process a folder, a hub id or 'default'.",
        show_default=False,
    ),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", "-n", min=1, help="Longest answer; default: the server's.", rich_help_panel=_SAMPLING
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", min=0.0, help="0 always takes the most probable token.", rich_help_panel=_SAMPLING
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k", min=0, help="Keep only the k most probable tokens; 0 keeps all.", rich_help_panel=_SAMPLING
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Keep the smallest set of tokens whose probability reaches this.", rich_help_panel=_SAMPLING
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, help="Equal seeds give equal answers; default: drawn anew.", rich_help_panel=_SAMPLING
    ),
]


def sampling_options(
    *, max_new_tokens: int | None, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
) -> SamplingOptions:
    """Return the options that were given; the defaults of the others are the server's."""
    options = SamplingOptions(temperature=temperature)
    if max_new_tokens is not None:
        options["max_tokens"] = max_new_tokens
    if top_k is not None:
        options["top_k"] = top_k
    if top_p is not None:
        options["top_p"] = top_p
    if seed is not None:
        options["seed"] = seed
    return options


def positive_numbers(text: str, *, option: str) -> tuple[float, ...]:
    """Return the different numbers of a list such as 0.5,1,2. Raises CliError."""
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise CliError(f"{option}: {text!r}; say positive numbers with commas between them, such as 0.5,1,2")
    return numbers
