"""A page in headless Chromium, driven by the DevTools protocol over a pipe: no driver and no further package."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where there is no such browser."""
TIMEOUT_S = 60.0
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
_QUIET = ("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update")


class Tab:
    """One page. Keeps the errors that it shows in its console, and every address that it asks for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        self.addresses: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params, **self._session}
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(TIMEOUT_S):
            return await answer

    async def listen(self) -> None:
        """Read answers and events until the browser ends."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if (answer := self._answers.pop(message.get("id"), None)) is not None:
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: Any) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.addresses.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])

    async def begin(self) -> None:
        """Open an empty page."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, address: str) -> None:
        """Go to an address."""
        await self.call("Page.navigate", url=address)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited if it is a promise. Raises AssertionError with what it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true; it is looked at whenever the document changes."""
        waiting = f"""new Promise((resolve) => {{
            const isDone = () => {condition};
            if (isDone()) return resolve(true);
            const observer = new MutationObserver(() => isDone() && (observer.disconnect(), resolve(true)));
            observer.observe(document, {{ subtree: true, childList: true, characterData: true, attributes: true }});
        }})"""
        try:
            await self.evaluate(waiting)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {condition}\n{text}\n{self.errors}") from None

    async def show(self, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window, and whether the user prefers light or dark pages."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self) -> bytes:
        """Return a picture of the whole page as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """Run a browser with one page. Needs `CHROMIUM`."""
    assert CHROMIUM is not None
    loop = asyncio.get_running_loop()
    its_input, ours = os.pipe()
    back, its_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}', CHROMIUM),
            *(*_OPTIONS, *_QUIET, f"--user-data-dir={folder}"),
            pass_fds=(its_input, its_output),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        reader = asyncio.StreamReader(limit=1 << 28)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(back, "rb"))
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours, "wb"))
        tab = Tab(reader, asyncio.StreamWriter(transport, protocol, None, loop))
        listening = asyncio.create_task(tab.listen())
        try:
            await tab.begin()
            yield tab
        finally:
            listening.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            transport.close()
