"""Runs the scripts of clients/ with interpreters and packages that are not the project's own."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON_ENV, NODE_ENV = "KVRELAY_FOREIGN_PYTHON", "KVRELAY_FOREIGN_NODE"
_CLIENTS = Path(__file__).parent / "clients"
_PRINT_MISSING = "import sys, importlib.util as i; print(*(name for name in sys.argv[1:] if i.find_spec(name) is None))"
_TIMEOUT_S = 240


async def python_with(*needs: str) -> str:
    """Return the interpreter. Skips the test where it lacks one of the packages."""
    python = os.environ.get(PYTHON_ENV, sys.executable)
    _returncode, missing, _told = await _run(python, "-c", _PRINT_MISSING, *needs)
    if missing.strip():
        pytest.skip(f"{missing.strip()} is not installed for {python}; `make foreign` installs it")
    return python


async def run_python(script: str, *arguments: str, needs: tuple[str, ...]) -> dict[str, Any]:
    """Return what a script prints. Skips the test where the interpreter lacks a package."""
    return _read(await _run(await python_with(*needs), str(_CLIENTS / script), *arguments))


async def run_node(script: str, *arguments: str, needs: tuple[str, ...]) -> dict[str, Any]:
    """Return what a script prints, which gets the folder of packages last. Skips the test without node or packages."""
    node, folder = _node_with(needs)
    return _read(await _run(node, str(_CLIENTS / script), *arguments, folder))


def _node_with(needs: tuple[str, ...]) -> tuple[str, str]:
    """Return the interpreter and the folder of its packages. Skips the test where one is missing."""
    node, named = shutil.which("node"), os.environ.get(NODE_ENV)
    if node is None:
        pytest.skip("node is not installed")
    if named is None:
        pytest.skip(f"{NODE_ENV} names no folder of node packages; `make foreign` makes one")
    folder = Path(named).resolve()
    for package in needs:
        if not (folder / "node_modules" / package).is_dir():
            pytest.skip(f"{package} is not installed in {folder}; `make foreign` installs it")
    return node, str(folder)


async def _run(*command: str) -> tuple[int | None, str, str]:
    """Run a command that sees nothing of this project and no hub; return its status and both of its outputs."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "OPENAI_API_KEY", "OPENAI_BASE_URL"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # LiteLLM fetches a list of prices when it is imported; LangSmith wants to trace.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "TOKENIZERS_PARALLELISM": "false"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | offline | quiet,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            printed, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, printed.decode(), told.decode()


def _read(ended: tuple[int | None, str, str]) -> dict[str, Any]:
    """Return the JSON of the last line that a script printed."""
    returncode, printed, told = ended
    assert returncode == 0, f"{told[-4000:]}\n{printed[-2000:]}"
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found
