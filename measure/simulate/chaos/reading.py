"""How the clients of a walk get their answers: from the router, or straight from the decode worker."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc

from common.lifecycle import LifeCycle
from kvrelay.client.direct import DirectCall
from kvrelay.v1 import decode_pb2_grpc, inference_pb2
from measure.simulate.chaos.audit import Audit
from measure.simulate.chaos.oracles import AnswerCheck
from measure.simulate.chaos.settings import ChaosSettings
from router.record.outbox import Outbox
from router.record.record import Delivery, Job
from router.tenants import ANYBODY as HOUSE
from router.tenants import Tenant


class Readers:
    """The reading ends of all clients. Event loop only."""

    def __init__(self, settings: ChaosSettings, audit: Audit, connect: Callable[[str], grpc.aio.Channel]) -> None:
        """`connect` makes channels to the workers that clients stream from."""
        self.audit = audit
        self._draw = random.Random(f"direct {settings.seed}")  # apart, so that it changes no other draw
        self._direct_share = settings.direct_share
        self._connect = connect

    def draw_delivery(self) -> Delivery:
        """Draw whether the client of the next request streams from the decode worker."""
        return Delivery.DIRECT if self._draw.random() < self._direct_share else Delivery.ROUTER

    async def read(self, outbox: Outbox, job: Job, check: AnswerCheck, life: LifeCycle, tenant: Tenant) -> None:
        """Check the messages of a request as its client gets them, until it ends or the client leaves.

        Raises TailLost when a worker took with it what it had written.
        """
        report, now_s, had_tokens_s = self.audit.report, asyncio.get_running_loop().time, None
        call: Any = _RoutersCall(outbox)
        if job.delivery is Delivery.DIRECT:
            report.num_direct += 1
            call = DirectCall(call, self._worker, num_samples=job.sampling.n, so_far=check.so_far())
        try:
            async for message in call:
                check.take(message)
                if not message.HasField("tokens"):
                    continue
                if had_tokens_s is not None:
                    report.longest_pause_s = max(report.longest_pause_s, now_s() - had_tokens_s)
                elif tenant is HOUSE:
                    report.longest_wait_s = max(report.longest_wait_s, now_s() - life.received_s)
                had_tokens_s = now_s()
        finally:
            call.cancel()

    def _worker(self, grant: inference_pb2.DirectGrant) -> "decode_pb2_grpc.DirectServiceAsyncStub":
        return decode_pb2_grpc.DirectServiceStub(self._connect(grant.address))


class _RoutersCall:
    """The call of a client that sits beside its router."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def __aiter__(self) -> "_RoutersCall":
        return self

    async def __anext__(self) -> inference_pb2.GenerateResponse:
        message = await self._outbox.get()
        if message is None:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        """Do nothing: leaving the block of the request cancels it."""
        return True
