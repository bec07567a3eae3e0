"""Enrolment over the standard streams of a child process.

The child writes a line with its request to stdout and reads a line with the answer from stdin: before it serves, and at
two thirds of each certificate's life. No other process has access to the streams.
"""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.process import CannotStart
from common.trust.credentials import Credentials
from common.trust.enrolment import Enrolment, EnrolmentRequest

logger = logging.getLogger(__name__)

_EVENT = "enrol"
_RETRY_S = 60.0
_RETRY_SHARE = 1 / 12
"""Pause after a failed renewal as a share of the certificate's life, if that is shorter."""
_ANSWER_S = 30.0


class NotEnrolled(CannotStart):
    """The launcher gave this process no certificate; the message says what to do."""


class EnrolmentPipe:
    """The child's end. Event loop only."""

    def __init__(self, credentials: Credentials, hosts: Callable[[], Sequence[str]] = tuple) -> None:
        """Take `hosts`, which returns the present addresses and names of a router's doors."""
        self._credentials = credentials
        self._hosts = hosts
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._is_closed = False

    async def open(self) -> None:
        """Get the first certificate. Raises NotEnrolled."""
        # A thread: event loops cannot wait for every kind of stdin.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="enrolment", daemon=True).start()
        try:
            await self._renew()
        except (ValueError, OSError, TimeoutError) as error:
            raise NotEnrolled(
                f"cannot start: no certificate came on stdin ({error}); start the cluster with `kvrelay up`"
            ) from error

    async def keep_renewed(self) -> None:
        """Renew in time, until cancelled or the other end is closed."""
        while not self._is_closed:
            await self._credentials.until_renewal()
            try:
                await self._renew()
            except Exception as error:  # noqa: BLE001 - the top of a task, which must not end
                retry_s = min(_RETRY_S, _RETRY_SHARE * self._credentials.held.enrolment.lifetime_s)
                logger.error("certificate not renewed", extra={"reason": str(error), "retry_s": retry_s})
                await asyncio.sleep(retry_s)

    async def _renew(self) -> None:
        request = self._credentials.request(self._hosts())
        print(json.dumps({"event": _EVENT, "request": request.to_json()}), flush=True)  # noqa: T201
        async with asyncio.timeout(_ANSWER_S):
            while line := await self._answers.get():
                try:
                    return self._credentials.accept(Enrolment.from_json(line))
                except ValueError as error:  # such as a late answer to an earlier request
                    logger.warning("answer passed over", extra={"reason": str(error)})
        raise ValueError("stdin is closed")

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        line = " "
        while line:
            line = sys.stdin.readline() if sys.stdin is not None else ""
            with suppress(RuntimeError):  # the loop is closed, and no task waits
                loop.call_soon_threadsafe(self._take, line)

    def _take(self, line: str) -> None:
        self._is_closed = not line
        self._answers.put_nowait(line)


def answer_to(line: str, enrol: Callable[[EnrolmentRequest], Enrolment]) -> str | None:
    """Return the launcher's answer to a line of a process's stdout; None if the line is not a request.

    Raises ValueError for a request that cannot be granted.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("event") != _EVENT:
        return None
    return enrol(EnrolmentRequest.from_json(str(entry.get("request")))).to_json() + "\n"
