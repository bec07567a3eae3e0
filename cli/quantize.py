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
    ] = 32,
    calibration: Annotated[
        list[Path] | None,
        typer.Option("--calibration", metavar="TEXT", help="Text file to round for; may be given several times."),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", metavar="N", min=512, help="Tokens of the texts to use.")
    ] = 32_768,
) -> None:
    """Write a checkpoint whose weights have 4 or 8 bits, for serving here or elsewhere.

    With calibration text like that to be served, weights are rounded by GPTQ,
    which at 4 bits keeps much more of a model's quality; it takes minutes and the
    memory of the plain model. Without it, each weight is rounded to the nearest
    value. Embedding and output head stay plain. Prints the new folder.

    \b
    kvrelay quantize default ./smol-int4 --calibration chats.txt
    """  # noqa: D301 - \b marks a preformatted block
    if group_size != -1 and (group_size < 32 or group_size % 32):
        raise typer.BadParameter(f"{group_size} is neither -1 nor a multiple of 32", param_hint="--group-size")
    from common.model_files import resolve_model
    from engine.model.checkpoints.quantizing import Rounding, quantize_checkpoint, read_windows

    assert format_name == "compressed-tensors", f"{format_name} has no writer"
    folder = resolve_model(model, local_files_only=False)
    with Progress() as report:
        windows = read_windows(calibration, folder, num_tokens=num_tokens) if calibration else []
        rounding = Rounding(bits=int(bits), group_size=group_size, windows=windows)
        quantize_checkpoint(folder, target, rounding, report)
    out.print(str(target), soft_wrap=True)
