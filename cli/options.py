"""Options that several commands share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from cli.errors import CliError
from common.sampling import PARAMETERS, SamplingOptions

DEFAULT_CONFIG = Path("serving.yaml")


Launcher = Literal["ray", "local"]
"""How processes are started."""

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", envvar="KVRELAY_CONFIG", help="The configuration file.")
]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen until Ctrl-C.")]
IntervalOption = Annotated[
    float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Refresh interval of --watch.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print every field, as JSON.")]


def check_form(*, watch: bool, as_json: bool) -> None:
    """Raise BadParameter for both forms of output at once."""
    if watch and as_json:
        raise typer.BadParameter("cannot watch as JSON: a watch redraws its output; give --watch or --json")


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
        help="Router, or several with commas; default: the cluster that `kvrelay up` started.",
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


def _sampling(option: str, *flags: str, help: str) -> Any:
    """Return an option with the declared bounds of a sampling parameter."""
    (declared,) = (each for each in PARAMETERS if each.option == option)
    return typer.Option(*flags, min=declared.least, max=declared.most, help=help, rich_help_panel="Sampling")


TemperatureOption = Annotated[
    float, _sampling("temperature", "--temperature", "-t", help="0 always takes the most probable token.")
]
TopPOption = Annotated[
    float | None, _sampling("top_p", "--top-p", help="Keep the smallest set of tokens whose probability reaches this.")
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options for how an answer is sampled."""

    max_tokens: Annotated[
        int | None,
        _sampling(
            "max_tokens", "--max-tokens", "--max-new-tokens", "-n", help="Longest answer; default: the server's."
        ),
    ] = None
    temperature: TemperatureOption = 0.0
    top_k: Annotated[
        int | None, _sampling("top_k", "--top-k", help="Keep only the k most probable tokens; 0 keeps all.")
    ] = None
    top_p: TopPOption = None
    seed: Annotated[
        int | None, _sampling("seed", "--seed", help="Equal seeds give equal answers; default: drawn anew.")
    ] = None

    def options(self) -> SamplingOptions:
        """Return the options that were given; the defaults of the others are the server's."""
        options = SamplingOptions(temperature=self.temperature)
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.top_k is not None:
            options["top_k"] = self.top_k
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.seed is not None:
            options["seed"] = self.seed
        return options


def options_from_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each field of its dataclass parameters as an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        own = inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(**own)
        command(**values)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


def positive_numbers(text: str, *, option: str) -> tuple[float, ...]:
    """Return the different numbers of a list such as 0.5,1,2. Raises CliError."""
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise CliError(f"{option}: {text!r}; say positive numbers with commas between them, such as 0.5,1,2")
    return numbers
