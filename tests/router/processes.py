"""Routers as processes of their own, started by hand."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from common.process import Ready, parse_ready
from common.trust.identity import Role
from tests.served_router import TIMEOUT_S
from tests.trust import enrol_child


@asynccontextmanager
async def router_process(
    folder: Path,
    *,
    config: str = "model: {engine: fake}\n",
    module: Sequence[str] = ("router",),
    wrapper: Sequence[str] = (),
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Ready]]:
    """Run a router as a process, which is ready inside the block.

    `module`: what Python runs, with its first arguments; `wrapper` executes the command.
    """
    file = folder / "serving.yaml"
    file.write_text(config, encoding="utf-8")
    options = ("--config", str(file), "--port", "0", "--die-with-parent")
    process = await asyncio.create_subprocess_exec(
        *(*wrapper, sys.executable, "-m", *module, *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            await enrol_child(process, Role.ROUTER, "router-0")
            ready = parse_ready((await process.stdout.readline()).decode())
        assert ready is not None
        yield process, ready
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
