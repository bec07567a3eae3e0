"""Cuts text files into the windows of tokens that a checkpoint is rounded for."""

from collections.abc import Sequence
from pathlib import Path

from common.text_files import load_tokenizer
from engine.model.checkpoints.quantizing import QuantizeFailed

WINDOW_TOKENS = 512


def read_windows(files: Sequence[Path], model_dir: Path, *, num_tokens: int) -> list[list[int]]:
    """Return windows of `WINDOW_TOKENS` tokens, evenly spaced over the texts: `num_tokens` in all, or what is there.

    Raises QuantizeFailed when a file cannot be read or the texts are shorter than one window, ModelNotFound without a
    tokenizer.
    """
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise QuantizeFailed(f"--calibration: cannot read {file} as text: {error}") from error
    return cut_windows("\n\n".join(texts), model_dir, num_tokens=num_tokens)


def cut_windows(text: str, model_dir: Path, *, num_tokens: int) -> list[list[int]]:
    """Return windows of a text; see `read_windows`."""
    token_ids = load_tokenizer(model_dir).encode(text, add_special_tokens=False).ids
    num_windows = min(max(1, num_tokens // WINDOW_TOKENS), len(token_ids) // WINDOW_TOKENS)
    if num_windows == 0:
        raise QuantizeFailed(
            f"--calibration: the text has {len(token_ids)} tokens; give at least {WINDOW_TOKENS}, better thousands"
        )
    stride = len(token_ids) // num_windows
    return [token_ids[begin : begin + WINDOW_TOKENS] for begin in range(0, num_windows * stride, stride)]
