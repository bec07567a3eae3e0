"""Arms on real clusters: start, warm up, send load, keep the results, stop."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc

from cluster.lifecycle import ClusterError, ClusterInfo, running_cluster
from cluster.trust import operator_proof, reach_of
from common.errors import EngineFault, KvrelayError, from_rpc_error
from common.rpc import Connect
from common.timing import GUESSED_LINK, TimingModel, timing_from_proto
from kvrelay.client import AsyncClient
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from measure.experiment.arms import ArmPlan
from measure.experiment.points import Arm, Cell, Point, Source, point_of
from measure.experiment.prepare import Workloads
from measure.experiment.runner import ArmFailed, CellFailed, Measure, Report
from measure.experiment.spec import ExperimentSpec
from measure.experiment.store import Store
from measure.load.measures import summarize
from measure.load.report.page import write_report
from measure.load.run import run_load
from measure.load.spec import LoadSpec, LoadTestFailed
from measure.load.store import RunWriter
from measure.load.targets.interface import TargetSpec
from measure.load.window import NothingMeasured
from measure.simulate.timing import KvSize, WindowPageSize, write_timing
from measure.workload.sessions import Workload

_TIMEOUT_S = 10.0
TIMING_FILE = "timing.json"
REPORT_FILE = "report.html"
_START_S = 8.0
"""Approximate time to start and stop a cluster; for the forecast only."""
_DRAIN_S = 3.0
"""Approximate time of the last answers, without think times; for the forecast only."""
_WARM_UP_DRAIN_S = 2.0
"""Time for the last answers of a warm-up; requests that still run then are cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorker:
    """A worker's size and speed."""

    timing: TimingModel
    num_blocks: int
    block_size: int
    block_bytes: int
    windows: WindowPageSize | None = None

    @property
    def kv(self) -> KvSize:
        """Size of its model's KV."""
        return KvSize(bytes_per_token=self.block_bytes // self.block_size, windows=self.windows)


async def ask_worker(address: str, connect: Connect) -> MeasuredWorker:
    """Return the facts of the worker whose control is at HOST:PORT. Raises KvrelayError."""
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            facts = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=_TIMEOUT_S)
            status = await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    if not status.HasField("timing"):
        raise EngineFault(f"worker {address} reports no timing: start it from this version of kvrelay")
    return MeasuredWorker(
        timing=timing_from_proto(status.timing),
        num_blocks=facts.num_blocks,
        block_size=facts.layout.block_size,
        block_bytes=facts.layout.block_bytes,
        windows=WindowPageSize(
            num_tokens=facts.window_tokens,
            page_bytes=facts.layout.window_page_bytes,
            is_chunk=facts.window_is_chunk,
        )
        if facts.window_tokens
        else None,
    )


def best_known(workers: Sequence[MeasuredWorker]) -> TimingModel:
    """Return a timing model for equal workers, at least one: each part from the one with most samples."""
    prefill = max((worker.timing for worker in workers), key=lambda timing: timing.prefill.num_samples)
    decode = max((worker.timing for worker in workers), key=lambda timing: timing.decode.num_samples)
    links = [link for worker in workers if (link := worker.timing.links.get(None)) is not None]
    return TimingModel(
        prefill=prefill.prefill,
        decode=decode.decode,
        max_step_tokens=prefill.max_step_tokens,
        links={None: max(links, key=lambda link: link.num_samples, default=GUESSED_LINK)},
    )


class RealBench:
    """Measures arms by sending them load. Main thread only."""

    source = Source.REAL

    def __init__(self, spec: ExperimentSpec, path: Path, *, workloads: Workloads, store: Store, report: Report) -> None:
        """`path`: the experiment's file, for messages."""
        self._spec = spec
        self._path = path
        self._workloads = workloads
        self._store = store
        self._report = report

    def seconds(self, num_cells: int, num_starts: int) -> float:
        """Return the approximate time of so many cells."""
        tail_s = min(_DRAIN_S + self._workloads.longest_thinking_s(), self._spec.drain_s)
        each_s = self._spec.warm_up_s + self._spec.duration_s + tail_s
        return num_cells * each_s + num_starts * (_START_S + self._spec.warm_up_s + _WARM_UP_DRAIN_S)

    @contextmanager
    def serve(self, plan: ArmPlan) -> Iterator[Measure]:
        """Start an arm, ready to be measured, and stop it at the end. Raises ArmFailed."""
        if plan.serving is None:
            target = TargetSpec(url=plan.url, api_key=plan.api_key)
            self._warm_up(plan.arm, target)
            yield partial(self._measure, plan.arm, target)
            return
        folder = self._store.arm_folder(plan.arm.name)
        try:
            with running_cluster(plan.serving, config_path=self._path, run_dir=folder, report=self._report) as info:
                target = TargetSpec(url=info.address, tls=info.tls)
                self._warm_up(plan.arm, target)
                yield partial(self._measure, plan.arm, target)
                self._keep_timing(info, folder)
        except ClusterError as error:
            raise ArmFailed(str(error)) from error

    def _warm_up(self, arm: Arm, target: TargetSpec) -> None:
        load = self._load(f"{arm.name}, warm-up", target, self._workloads.warm_up())
        try:
            asyncio.run(run_load(replace(load, drain_s=_WARM_UP_DRAIN_S)))
        except (KvrelayError, LoadTestFailed) as error:
            raise ArmFailed(f"it does not answer: {error}") from error

    def _measure(self, arm: Arm, target: TargetSpec, cell: Cell, folder: Path) -> Point:
        self._report(f"{arm.name} at {cell.load:g}/s, repeat {cell.repeat + 1}")
        load = self._load(f"{self._spec.name}: {arm.name}", target, self._workloads.of(cell))
        labels = {"load": f"{cell.load:g}", "repeat": str(cell.repeat + 1)}
        try:
            with RunWriter(folder) as writer:
                run = asyncio.run(run_load(replace(load, labels=labels), writer))
                writer.finish(run.info)
            summary = summarize(run, slo=self._spec.objectives, warm_up_s=self._spec.warm_up_s)
        except (KvrelayError, LoadTestFailed, NothingMeasured) as error:
            raise CellFailed(str(error)) from error
        write_report(run, summary, folder / REPORT_FILE)
        goals = self._spec.goals(self._workloads.load_unit)
        point = point_of(run, summary.window, arm=arm, cell=cell, source=Source.REAL, goals=goals)
        return replace(point, warnings=summary.warnings)

    def _load(self, name: str, target: TargetSpec, workload: Workload) -> LoadSpec:
        return LoadSpec(
            name=name,
            target=target,
            workload=workload,
            specification=self._workloads.fingerprint,
            slo=self._spec.objectives,
            drain_s=self._spec.drain_s,
        )

    def _keep_timing(self, info: ClusterInfo, folder: Path) -> None:
        """Keep the timing models of the workers, for simulations."""
        try:
            facts = asyncio.run(_ask_workers(info))
        except KvrelayError as error:
            self._report(f"the workers' timing is not known: {error}")
            return
        write_timing(folder / TIMING_FILE, best_known(facts), facts[0].kv)


async def _ask_workers(info: ClusterInfo) -> list[MeasuredWorker]:
    async with AsyncClient(info.address, tls=info.tls, api_key=operator_proof(info.run_dir)) as client:
        addresses = [view.address for view in (await client.status()).workers]
    return [await ask_worker(each, reach_of(info.run_dir).worker) for each in addresses]
