"""The runtime of one worker: engine thread, epoch, counters, and everything that its services share."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from common.chat_template import LineTemplate
from common.config import PoolConfig, ServingConfig
from common.errors import InvalidRequest, Overloaded, Refused, StaleEpoch, WorkerLost
from common.ids import Epoch, HashRoot, WorkerId, mint_epoch
from common.kv_events import NO_EVENTS, KvEvents
from common.parity import Template, TextProbes, text_probes
from common.process import CannotStart
from common.structured import keep_going
from common.tracing import NO_TRACER, Stages, tracing_call
from common.wire_names import ROLE_NAMES
from engine.events import EngineLoad, StepReport
from engine.interface import Engine, ServedModel
from engine.published import ForgottenPages
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.thread import EngineDriver, EngineSetup
from kv_tiers.tiers import Tiers
from kv_transfer.handoff import HandoffTable
from kv_transfer.pull import KvPuller
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.transports.transport import to_end
from kvrelay.v1 import sequence_pb2, worker_pb2
from worker.environment import Environment
from worker.factory import limits_for
from worker.grammars import GrammarCompiler
from worker.kv_event_hub import KvEventHub
from worker.open_calls import OpenCalls
from worker.peers import PeerChannels
from worker.prefill_gate import PrefillGate, Quarantine
from worker.prefix_pull import PrefixPuller
from worker.read_ahead import ReadAhead
from worker.read_gate import ReadGate
from worker.recent_steps import RecentSteps
from worker.request import engine_request
from worker.timing import WorkerTiming
from worker.worker_tiers import WorkerTiers, left_on_disk

logger = logging.getLogger(__name__)

_EXIT_SOFTWARE = 70  # sysexits.h: internal software error


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPorts:
    """Ports of a worker besides its control port."""

    kv: int = 0
    direct: int = 0
    metrics: int = 0
    """0 when off."""


class WorkerRuntime:
    """Everything that a worker's services use. Event loop only; the engine has its own thread."""

    def __init__(
        self,
        *,
        config: ServingConfig,
        role: worker_pb2.WorkerRole.ValueType,
        worker_id: WorkerId,
        executor: ServedModel,
        tokenizer: tokenizers.Tokenizer,
        environment: Environment,
    ) -> None:
        self.config = config
        self.role = role
        self.worker_id = worker_id
        self.epoch: Epoch = mint_epoch()
        self.executor = executor
        self.tokenizer = tokenizer
        self.chat_template: Template | None = LineTemplate()
        """The model's chat template; the fake engine's by default."""
        self.tracer = NO_TRACER
        """Takes the spans of traced calls; set when it is loaded."""
        self.clock = clock = environment.clock
        self.connect = environment.connect
        self.ports = ServedPorts()
        """Set when it serves."""
        self._check_pull = environment.check_pull
        self.bytes_sent: Counter[int] = Counter()
        self.bytes_received: Counter[int] = Counter()
        self.hub = KvEventHub()
        max_step_tokens = self.pool_config.max_step_tokens
        self.timing = WorkerTiming(max_step_tokens=max_step_tokens, clock=clock, floors=executor.floors)
        self.recent_steps = RecentSteps(executor.floors, clock)
        self.host_cores = environment.host_cores
        self.link_rates: Mapping[int, float] = {}
        """Bytes per second by transport between pages of this host, as measured at the start."""
        setup = EngineSetup(
            limits=limits_for(self.pool_config), clock=clock, on_report=self._on_report, on_fault=_end_process
        )
        self.engine: EngineDriver = environment.drive(executor, setup)
        self.load: EngineLoad = self.engine.core.load()
        self._started_s = clock.monotonic()
        self.handoffs = HandoffTable(
            block_size=executor.kv.shape.block_size, lease_ttl_s=config.transfer.lease_ttl_s, clock=clock
        )
        self.calls = OpenCalls(self.handoffs)
        self.peers = PeerChannels(environment.connect)
        self._transports = WorkerTransports.configured(config.transfer, executor.kv)
        self.puller = KvPuller(
            store=executor.kv,
            transports=self._transports,
            clock=clock,
            on_bytes=self._note_pulled,
            on_pull=self.timing.observe_pull,
        )
        self.tiers = self._with_tiers(environment.tiers) if environment.tiers is not None else None
        self.prefixes = PrefixPuller(
            engine=self.engine,
            puller=self.puller,
            peers=self.peers,
            block_size=executor.kv.shape.block_size,
            prefill_s=lambda num_new_tokens, num_cached_tokens: self.timing.model.prefill_s(
                num_new_tokens, num_cached_tokens
            ),
            tiers=self.tiers,
        )
        self.read_ahead = ReadAhead(self.prefixes, num_pages=executor.kv.num_blocks, clock=clock)
        self.prefill_gate = PrefillGate(self.backlog_s)
        self.grammars = GrammarCompiler(tokenizer, executor)
        self.quarantine = Quarantine()
        self.is_leaving = False
        """Whether the worker has announced to the routers that it will end."""
        self.on_drain: list[Callable[[], None]] = []
        """Called when the worker stops: endless streams must end with their last request."""
        self.on_close: list[Callable[[], Awaitable[None]]] = [self.peers.aclose, self.grammars.aclose]
        if self.tiers is not None:
            self.on_close.append(self.tiers.aclose)
        self._sweeper: asyncio.Task[None] | None = None

    def _with_tiers(self, tiers: Tiers) -> WorkerTiers:
        """Raise CannotStart when blocks cannot be copied out of the pages."""
        lives = self.engine.core.report_published()
        if lives is None:
            raise CannotStart(
                f"tiers: {self.executor.model_name} has layers with window pages or states, whose blocks tiers cannot"
                " keep; set tiers.host_gib and tiers.disk_gib to 0"
            )
        return WorkerTiers(
            tiers,
            store=self.executor.kv,
            lives=lives,
            clock=self.clock,
            on_changes=self._on_tier_changes,
            gate=self._read_gate(),
        )

    def _read_gate(self) -> ReadGate:
        shape = self.executor.kv.shape
        return ReadGate(
            lambda: self.timing,
            backlog_s=self.backlog_s,
            token_bytes=shape.block_bytes / shape.block_size,
            clock=self.clock,
        )

    @cached_property
    def probes(self) -> TextProbes:
        """Results of this worker for the fixed texts, which routers compare with their own."""
        return text_probes(self.tokenizer, self.chat_template)

    async def engine_request(self, spec: sequence_pb2.SequenceSpec) -> EngineRequest:
        """Return the engine's record of a request. Raises InvalidRequest, PromptTooLong, Overloaded."""
        grammar = None
        if structure := spec.sampling.structured_outputs:
            grammar = await self.grammars.compile(structure, spec.output_tokens, root=HashRoot(spec.hash_root))
        request = engine_request(spec, self.executor, grammar)
        self.read_ahead.blocks.use(request.block_hashes)
        return request

    @property
    def pool_config(self) -> PoolConfig:
        """The section of serving.yaml that describes this worker's pool."""
        return pool_of(self.config, self.role)

    @property
    def num_ranks(self) -> int:
        """Processes that share the model's weights and heads, this one included."""
        return self.pool_config.tensor_parallel

    @property
    def num_request_tasks(self) -> int:
        """Calls that serve requests or transfers now."""
        return self.calls.num_open

    @property
    def uptime_s(self) -> float:
        """Seconds since this runtime was created."""
        return self.clock.monotonic() - self._started_s

    def start(self) -> None:
        """Start stepping and sweeping."""
        self.engine.start()
        if self.tiers is not None:
            self.tiers.start()
        self._share_timing()
        sweeping = keep_going("sweeping", self._sweep_forever)
        self._sweeper = asyncio.get_running_loop().create_task(sweeping)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.transfer.lease_ttl_s / 4)
            self.sweep()

    def sweep(self) -> None:
        """Abort handoffs that lack a side for too long, and forget idle links; routers hear of it at once."""
        self.handoffs.sweep()
        before = self.timing.version
        self.timing.forget_links()
        if self.timing.version != before:
            self.hub.publish(NO_EVENTS)

    async def aclose(self) -> None:
        """Stop the sweeper, run `on_close`, and stop the engine thread."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        for close in self.on_close:
            await close()
        await self.engine.aclose()
        await asyncio.to_thread(self.tracer.close)

    async def change_role(self, role: worker_pb2.WorkerRole.ValueType, *, epoch: int, grace_s: float) -> None:
        """Move to the other pool, with the model, the pages and everything cached in them.

        Waits up to `grace_s` for requests and handoffs to end. New ones still come in, so the caller drains the worker
        first. Succeeds when it has the role already. Raises, with nothing changed: StaleEpoch for another life than
        `epoch`, WorkerLost when the worker is leaving, InvalidRequest when the pools are too different, Overloaded
        when it is not empty in time.
        """
        if self.role == role:
            return
        self.check_epoch(epoch)
        if self.is_leaving:
            raise WorkerLost(f"{self.worker_id} is leaving")
        if (obstacle := self.config.pools.flip_obstacle) is not None:
            raise InvalidRequest(f"cannot change the role of this worker: {obstacle}", field="role")
        try:
            async with asyncio.timeout(grace_s):
                await self.calls.until_idle()
        except TimeoutError:
            held = f"{self.calls.num_open} calls and {self.handoffs.num_leases} handoffs"
            raise Overloaded(f"{self.worker_id} still has {held} after {grace_s:g} s", retry_after_s=1.0) from None
        if self.role == role:  # by another caller
            return
        self.check_epoch(epoch)
        self._enter_role(role)

    def _enter_role(self, role: worker_pb2.WorkerRole.ValueType) -> None:
        """Change in one turn of the event loop: callers with the new epoch reach the engine after its new limits."""
        self.role = role
        self.epoch = mint_epoch()
        limits = limits_for(self.pool_config)
        self.engine.post(lambda core: core.change_limits(limits))
        self.timing.change_budget(limits.max_step_tokens)
        self._share_timing()
        self.hub.end(StaleEpoch(f"{self.worker_id} has changed its role"))
        logger.info("role changed", extra={"role": ROLE_NAMES[role], "epoch": self.epoch})

    def _share_timing(self) -> None:
        """Let the scheduler use the present timing model, once both kinds of steps were measured."""
        model = self.timing.model
        if model.prefill.is_measured and model.decode.is_measured:
            self.engine.post(lambda core: core.take_timing(model))

    def announce_leaving(self) -> None:
        """Announce to the routers that this worker will end."""
        self.is_leaving = True
        self.hub.publish(KvEvents())

    def tracing(self, spec: sequence_pb2.SequenceSpec, name: str) -> AbstractContextManager[Stages]:
        """Trace the block, which serves a call of a router, below the router's attempt if that is traced."""
        return tracing_call(self.tracer, self.clock, spec.traceparent, name, worker=self.worker_id)

    async def admit(self, add: Callable[[Engine], Group | Refused]) -> Group:
        """Return the group that `add` makes on the engine thread; a cancelled caller cancels it. Raises Overloaded."""
        group = await self.engine.acquire(add, _cancel_if_granted)
        if isinstance(group, Refused):
            raise group.error()
        return group

    def backlog_s(self) -> float:
        """Return the predicted seconds until all accepted prompts are computed."""
        return self.timing.backlog_s(self.load, now_s=self.clock.monotonic())

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch when the epoch is that of another life of this worker."""
        if epoch != self.epoch:
            raise StaleEpoch(f"{self.worker_id} was restarted, or has changed its role; its epoch is a new one")

    def transfer_service(self) -> KvTransferService:
        """Return the service from which other workers pull blocks."""
        return KvTransferService(
            table=self.handoffs,
            engine=self.engine,
            store=self.executor.kv,
            settings=ServeSettings(
                worker_id=self.worker_id,
                check_pull=self._check_pull,
                offloaded=self.tiers,
                chunk_bytes=self.config.transfer.chunk_bytes,
                epoch=lambda: self.epoch,
                transports=self._transports,
                lease_ttl_s=self.config.transfer.lease_ttl_s,
            ),
            track=self.calls.transfer,
            on_bytes=lambda transport, count: self.bytes_sent.update({transport: count}),
        )

    def _note_pulled(self, transport: int, num_bytes: int) -> None:
        self.bytes_received[transport] += num_bytes
        bytes_per_s = self.timing.link_bytes_per_s or self.link_rates.get(transport)
        self.recent_steps.note_pulled(num_bytes, bytes_per_s=bytes_per_s)

    def _on_report(self, report: StepReport) -> None:
        self.load = report.load if self.tiers is None else self.tiers.measured(report.load)
        if self.host_cores is not None:
            self.host_cores.note()
        before = self.timing.version
        self.timing.observe(report.samples)
        self.recent_steps.observe(report.samples, has_work=report.load.num_running + report.load.num_waiting > 0)
        if self.timing.version != before:
            self._share_timing()
        events = report.kv_events if self.tiers is None else self.tiers.take(report)
        self.hub.publish(events, report.accepted)
        self.read_ahead.blocks.drop(report.kv_events.removed)
        self.prefixes.note_load(report.load)

    def _on_tier_changes(self, events: KvEvents) -> None:
        assert self.tiers is not None, "there are no tiers"
        self.load = self.tiers.measured(self.load)  # also while no step runs
        self.hub.publish(events)

    async def forget(self, root: HashRoot) -> worker_pb2.ForgetBlocksResponse:
        """Drop the blocks of a root from pages and tiers, but for what requests and transfers use."""
        is_in_use = self._is_moving(root)
        pages: ForgottenPages = await self.engine.call(lambda core: core.forget(root))
        troubles, num_in_tiers = [pages.obstacle], 0
        if self.tiers is not None:  # after the pages: what waits to be written from one without its block never is
            num_in_tiers = await self.tiers.forget(root)
            troubles.append(self.tiers.obstacle)
        else:
            troubles.append(await to_end(left_on_disk, self.config.tiers))
        if is_in_use or pages.is_in_use or self._is_moving(root):
            troubles.append("requests or transfers use some of the blocks: run it again when they have ended")
        return worker_pb2.ForgetBlocksResponse(
            num_tier_blocks=num_in_tiers, num_page_blocks=pages.num_blocks, trouble="; ".join(filter(None, troubles))
        )

    def _is_moving(self, root: HashRoot) -> bool:
        """Whether blocks of a root are on their way into pages, or from tiers to another worker."""
        return self.prefixes.is_fetching(root) or (self.tiers is not None and self.tiers.serving.is_reading(root))

    async def snapshot(self) -> KvEvents:
        """Return all blocks that the worker holds, in pages or in tiers."""
        of_pages: KvEvents = await self.engine.call(lambda core: core.snapshot())
        return of_pages if self.tiers is None else await self.tiers.snapshot(of_pages)


def _cancel_if_granted(core: Engine, group: Group | Refused) -> None:
    if isinstance(group, Group):
        core.cancel(group)


def _end_process(_error: Exception) -> None:
    """Exit at once: routers see the connection break and recover elsewhere, and the supervisor restarts the worker."""
    os._exit(_EXIT_SOFTWARE)


def pool_of(config: ServingConfig, role: worker_pb2.WorkerRole.ValueType) -> PoolConfig:
    """Return the pool section of a role."""
    return config.pools.prefill if role == worker_pb2.WORKER_ROLE_PREFILL else config.pools.decode
