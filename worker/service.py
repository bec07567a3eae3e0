"""WorkerService: identity, cache events, load, status and role of this worker."""

import asyncio
import math
import os
import time
from functools import lru_cache, partial
from typing import Any

import grpc

from common.block_hash import HASH_BYTES, ROOT_BYTES, hash_probe, hash_root
from common.errors import InvalidRequest
from common.ids import BlockHash, HashRoot
from common.kv_events import KvEvents, encode_events
from common.return_curve import ReturnCurve
from common.rpc import error_boundary
from common.timing import timing_to_proto
from common.version import installed_version
from common.wire import message_of
from common.wire_names import ROLE_NAMES
from engine.interface import Engine
from engine.work import StepFloors
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.peers import PeerProbe
from worker.recent_steps import WINDOWS_S
from worker.runtime import WorkerRuntime
from worker.step_watch import overdue_watch_of
from worker.trial import run_trial

UPDATE_GAP_S = 0.02
"""Shortest time between two updates: load changes with each step, and routers do not need every change."""
MAX_HEARTBEAT_S = 60.0
MAX_GRACE_S = 3600.0
MAX_TRIAL_TOKENS = 64
MAX_RETURNS = 64
MAX_CURVE_STEPS = 64

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Answers questions about one runtime."""

    def __init__(self, runtime: WorkerRuntime, *, update_gap_s: float = UPDATE_GAP_S) -> None:
        """`update_gap_s`: shortest time between two updates of one watcher."""
        self._runtime = runtime
        self._update_gap_s = update_gap_s
        self._probe = PeerProbe(runtime.connect)

    async def DescribeWorker(  # noqa: D102
        self, request: pb.DescribeWorkerRequest, context: Context
    ) -> pb.DescribeWorkerResponse:
        return self._describe()

    def _describe(self) -> pb.DescribeWorkerResponse:
        runtime = self._runtime
        executor, shape = runtime.executor, runtime.executor.kv.shape
        return message_of(
            pb.DescribeWorkerResponse,
            *(executor.kv, executor, runtime),
            layout=message_of(pb.KvLayout, shape),
            hash_probe=hash_probe(hash_root(model_fingerprint=shape.fingerprint), shape.block_size),
            metrics_port=runtime.ports.metrics,
            kv_port=runtime.ports.kv,
            direct_port=runtime.ports.direct,
            pid=os.getpid(),
            eos_token_ids=sorted(executor.eos_token_ids),
            tokenizer_probe=runtime.probes.tokenizer,
            template_probe=runtime.probes.template,
            version=installed_version(),
            unix_time_s=time.time(),
            window_tokens=0 if shape.windowed is None else shape.windowed.num_tokens,
            window_is_chunk=shape.windowed is not None and shape.windowed.is_chunk,
        )

    async def WatchWorker(  # type: ignore[override]  # noqa: D102
        self, request: pb.WatchWorkerRequest, context: Context
    ) -> None:
        async with error_boundary(context, "WatchWorker"):
            runtime, timing = self._runtime, self._runtime.timing
            with runtime.hub.watch() as watcher:
                events: KvEvents = await runtime.snapshot()
                seq, sent_version = 0, -1
                heartbeat_s, overdue = None, None
                if request.heartbeat_s > 0:
                    heartbeat_s = min(max(request.heartbeat_s, self._update_gap_s), MAX_HEARTBEAT_S)
                    overdue = overdue_watch_of(runtime, gap_s=heartbeat_s)
                while True:
                    update = pb.WatchWorkerResponse(
                        epoch=runtime.epoch,
                        seq=seq,
                        kv_events=encode_events(events) if events else b"",
                        load=load_report(runtime),
                        accepted_request_ids=watcher.take_accepted(),
                        leaving=runtime.is_leaving,
                        overdue=overdue is not None and overdue.look(),
                    )
                    if sent_version != timing.version:
                        sent_version = timing.version
                        update.timing.CopyFrom(timing_to_proto(timing.model, timing.transports))
                    await context.write(update)
                    seq += 1
                    await asyncio.sleep(self._update_gap_s)
                    events = await watcher.next_changes(within_s=heartbeat_s)

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:  # noqa: D102
        async with error_boundary(context, "SetRole"):
            if request.role not in ROLE_NAMES:
                raise InvalidRequest(f"unknown role {request.role}", field="role")
            if not 0 <= request.grace_s <= MAX_GRACE_S:
                raise InvalidRequest(f"{request.grace_s:g}; must be 0 to {MAX_GRACE_S:g} seconds", field="grace_s")
            await self._runtime.change_role(request.role, epoch=request.epoch, grace_s=request.grace_s)
        return pb.SetRoleResponse(epoch=self._runtime.epoch)

    async def RunTrial(self, request: pb.RunTrialRequest, context: Context) -> pb.RunTrialResponse:  # noqa: D102
        async with error_boundary(context, "RunTrial"):
            if not 1 <= request.num_tokens <= MAX_TRIAL_TOKENS:
                raise InvalidRequest(f"{request.num_tokens}; must be 1 to {MAX_TRIAL_TOKENS}", field="num_tokens")
            answers = await run_trial(self._runtime, num_tokens=request.num_tokens)
        return pb.RunTrialResponse(answers=[pb.TrialAnswer(token_ids=token_ids) for token_ids in answers])

    async def GetWorkerStatus(  # noqa: D102
        self, request: pb.GetWorkerStatusRequest, context: Context
    ) -> pb.GetWorkerStatusResponse:
        runtime = self._runtime
        load = runtime.load  # of the last step: asking the engine would wait for the running one
        return pb.GetWorkerStatusResponse(
            status=message_of(
                pb.WorkerStatus,
                *(load, runtime, runtime.handoffs, runtime.calls, runtime.timing),
                load=load_report(runtime),
                num_reservations=load.num_reserved,
                num_leases_expired=runtime.handoffs.num_expired,
                kv_bytes_received=runtime.bytes_received.total(),
                kv_bytes_sent=runtime.bytes_sent.total(),
                pid=os.getpid(),
                recent_steps=[_steps_of_last(runtime, window_s) for window_s in WINDOWS_S],
                device=_device_report(runtime.executor.floors),
                num_idle_cores=None if runtime.host_cores is None else runtime.host_cores.num_idle,
                link_rates=_link_rates(runtime),
                tenant_pins=[
                    pb.TenantPins(tenant=tenant, num_tokens=num_blocks * runtime.executor.kv.shape.block_size)
                    for tenant, num_blocks in load.tenant_pins.items()
                ],
            ),
            timing=timing_to_proto(runtime.timing.model, runtime.timing.transports),
        )

    async def ProbePeer(self, request: pb.ProbePeerRequest, context: Context) -> pb.ProbePeerResponse:  # noqa: D102
        async with error_boundary(context, "ProbePeer"):
            return await self._probe.reach(request, message_of(pb.KvLayout, self._runtime.executor.kv.shape))

    async def ForgetBlocks(self, request: pb.ForgetBlocksRequest, context: Context) -> pb.ForgetBlocksResponse:  # noqa: D102
        async with error_boundary(context, "ForgetBlocks"):
            if len(request.hash_root) != ROOT_BYTES:
                raise InvalidRequest(f"has {len(request.hash_root)} bytes, not {ROOT_BYTES}", field="hash_root")
            return await self._runtime.forget(HashRoot(request.hash_root))

    async def ExpectReturns(  # noqa: D102
        self, request: pb.ExpectReturnsRequest, context: Context
    ) -> pb.ExpectReturnsResponse:
        async with error_boundary(context, "ExpectReturns"):
            if len(request.returns) > MAX_RETURNS:
                raise InvalidRequest(
                    f"{len(request.returns)} entries; at most {MAX_RETURNS} are taken", field="returns"
                )
            returns = [(_ends_of(each), _curve_of(each)) for each in request.returns]
            for ends, curve in returns:
                self._runtime.engine.post(partial(_expect_return, ends, curve))
        return pb.ExpectReturnsResponse()


def _expect_return(ends: list[BlockHash], curve: ReturnCurve, engine: Engine) -> None:
    engine.expect_return(ends, curve)


def _ends_of(expected: pb.ExpectedReturn) -> list[BlockHash]:
    """Return the ends of a turn. Raises InvalidRequest."""
    if any(len(each) != HASH_BYTES for each in expected.ends):
        raise InvalidRequest(f"every hash must have {HASH_BYTES} bytes", field="returns.ends")
    return [BlockHash(each) for each in expected.ends[:2]]


def _curve_of(expected: pb.ExpectedReturn) -> ReturnCurve:
    """Return what a turn is like. Raises InvalidRequest."""
    like_s, ages_s = tuple(expected.like_s), tuple(expected.ages_s)
    if not 1 <= len(like_s) == len(ages_s) + 1 <= MAX_CURVE_STEPS:
        raise InvalidRequest(
            f"{len(like_s)} likenesses and {len(ages_s)} ages; there must be 1 to {MAX_CURVE_STEPS} likenesses, and one"
            " age fewer",
            field="returns.like_s",
        )
    if not all(map(math.isfinite, (*like_s, *ages_s))) or min(like_s) < 0 or list(ages_s) != sorted(ages_s):
        raise InvalidRequest("must be finite, not negative, and ages ascending", field="returns.ages_s")
    return _shared(ReturnCurve(like_s=like_s, ages_s=ages_s))


@lru_cache(maxsize=512)
def _shared(curve: ReturnCurve) -> ReturnCurve:
    """Return an equal curve: a router tells few ones, each of many turns, and cached pages keep it."""
    return curve


def _steps_of_last(runtime: WorkerRuntime, window_s: float) -> pb.StepTotals:
    covered_s, totals = runtime.recent_steps.over(window_s)
    return message_of(pb.StepTotals, totals, window_s=window_s, covered_s=covered_s)


def _link_rates(runtime: WorkerRuntime) -> list[pb.LinkRate]:
    """Return the transports that were measured at the start, or by which it has pulled."""
    slowest = runtime.timing.slowest_links
    rates = []
    for number in sorted(runtime.link_rates.keys() | slowest.keys()):
        rate = pb.LinkRate(
            transport=pb.KvTransport.ValueType(number), most_bytes_per_s=runtime.link_rates.get(number, 0.0)
        )
        if number in slowest:
            rate.peer_worker_id, link = slowest[number]
            rate.bytes_per_s, rate.num_pulls = link.bytes_per_s, link.num_samples
        rates.append(rate)
    return rates


def _device_report(floors: StepFloors | None) -> pb.DeviceReport | None:
    if floors is None:
        return None
    model = floors.model
    return message_of(
        pb.DeviceReport,
        *(floors, floors.rates),
        layer_flops=2 * model.num_layer_weights,
        head_flops=2 * model.num_head_weights,
        pair_flops=model.flops_per_pair,
    )


def load_report(runtime: WorkerRuntime) -> pb.LoadReport:
    """Return a worker's load as it is reported to routers."""
    return message_of(
        pb.LoadReport,
        runtime.load,
        prefill_backlog_s=runtime.backlog_s(),
        tier_alarms=() if runtime.tiers is None else runtime.tiers.writes.stats.alarms,
    )
