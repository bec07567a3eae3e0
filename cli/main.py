"""Entry point of the `kvrelay` command."""

import io
import sys
from typing import Annotated

import typer

from cli.bench import bench_app
from cli.changes import cancel, changes
from cli.chat import chat
from cli.cluster import down, fetch_model, up
from cli.console import out
from cli.demo import demo
from cli.doctor import doctor
from cli.errors import ErrorReportingGroup
from cli.experiment import experiment_app
from cli.explain import explain
from cli.forget import forget
from cli.generate import generate
from cli.logs import logs
from cli.plan import plan
from cli.quantize import quantize
from cli.roofline import roofline
from cli.scale import restart, rollout, scale
from cli.simulate import simulate
from cli.status import status
from cli.trace import trace_app
from cli.why import why

app = typer.Typer(
    name="kvrelay",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from common.version import installed_version

        out.print(f"kvrelay {installed_version()}")
        raise typer.Exit


@app.callback()
def kvrelay(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve a large language model from two pools of workers: one reads prompts, one writes answers.

    \b
    kvrelay up                                  start the cluster of ./serving.yaml
    kvrelay generate -p "Why is the sky blue?"  send it a prompt
    kvrelay status --watch                      watch its load
    kvrelay down                                stop it
    """  # noqa: D301 - \b marks a preformatted block


_CLUSTER, _USE, _STUDY = "Cluster", "Use", "Study"
app.command(rich_help_panel=_CLUSTER)(up)
app.command(rich_help_panel=_CLUSTER)(down)
app.command(rich_help_panel=_CLUSTER)(status)
app.command(rich_help_panel=_CLUSTER)(scale)
app.command(rich_help_panel=_CLUSTER)(plan)
app.command(rich_help_panel=_CLUSTER)(changes)
app.command(rich_help_panel=_CLUSTER)(cancel)
app.command(rich_help_panel=_CLUSTER)(restart)
app.command(rich_help_panel=_CLUSTER)(rollout)
app.command(rich_help_panel=_CLUSTER)(explain)
app.command(rich_help_panel=_CLUSTER)(why)
app.command(rich_help_panel=_CLUSTER)(roofline)
app.command(rich_help_panel=_CLUSTER)(logs)
app.command(rich_help_panel=_CLUSTER)(doctor)
app.command(rich_help_panel=_CLUSTER)(forget)
app.command("fetch-model", rich_help_panel=_CLUSTER)(fetch_model)
app.command(rich_help_panel=_CLUSTER)(quantize)
app.command(rich_help_panel=_USE)(generate)
app.command(rich_help_panel=_USE)(chat)
app.command(rich_help_panel=_USE)(demo)
app.command(rich_help_panel=_STUDY)(simulate)
app.add_typer(bench_app, name="bench", rich_help_panel=_STUDY)
app.add_typer(trace_app, name="trace", rich_help_panel=_STUDY)
app.add_typer(experiment_app, name="experiment", rich_help_panel=_STUDY)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer may hold what the terminal's encoding does not
            stream.reconfigure(errors="replace")
    app(prog_name="kvrelay")
