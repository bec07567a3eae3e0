"""`kvrelay quantize`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.console import Progress, out


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a hub id, or `default`.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, which must not exist.")],
    format_name: Annotated[
        Literal["compressed-tensors"], typer.Option("--format", help="Format of the checkpoint.")
    ] = "compressed-tensors",
    bits: Annotated[Literal["4", "8"], typer.Option("--bits", help="Bits of a weight.")] = "4",
    group_size: Annotated[
        int, typer.Option("--group-size", metavar="N", help="Inputs that share a scale: a multiple of 32; -1 for all.")
    ] = 128,
) -> None:
    """Write a checkpoint whose weights have 4 or 8 bits, for serving here or elsewhere.

    Rounds the layers' projections to the nearest point of a grid with a searched
    scale, and needs no text. Embedding and output head stay as they are. Prints
    the new folder.

    \b
    kvrelay quantize default ./smol-int4 --bits 4 --group-size 64
    """  # noqa: D301 - \b marks a preformatted block
    if group_size != -1 and (group_size < 32 or group_size % 32):
        raise typer.BadParameter(f"{group_size} is neither -1 nor a multiple of 32", param_hint="--group-size")
    from common.model_files import resolve_model
    from engine.model.checkpoints.quantizing import Rounding, quantize_checkpoint

    assert format_name == "compressed-tensors", f"{format_name} has no writer"
    folder = resolve_model(model, local_files_only=False)
    with Progress() as report:
        quantize_checkpoint(folder, target, Rounding(bits=int(bits), group_size=group_size), report)
    out.print(str(target), soft_wrap=True)
