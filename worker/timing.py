"""Timing models that a worker fits to its own steps, pulls and reads from tiers, and its prediction for its queue."""

from collections.abc import Iterable, Mapping

from common.clock import Clock
from common.ids import WorkerId
from common.timing import GUESSED_LINK, GUESSED_TIMING, STEP_WEIGHTS, LinkModel, StepModel, StepShape, TimingModel
from engine.events import EngineLoad, StepSample
from engine.work import StepFloors
from worker.timing_fit import RobustFit

NUM_WARM_UP_STEPS = 2
"""First steps of each kind that are left out: caches are cold, kernels may still be compiled."""
MIN_CHANGE = 0.05
"""Relative change of a prediction from which on routers get the new model."""
MAX_PEERS = 256
LINK_MEMORY_S, MAX_LINK_MEMORY_S = 10.0, 120.0
"""Time after the last pull for which a link's model is kept: the first for each pull, at most the second. It doubles
each time that the link is forgotten, since one that stays slow would be tried every 10 s."""
GAP_STEPS = 32
"""Steps whose tokens together are a sample of the gap between tokens."""
_FIT_INTERVAL = 1024
_DRIFT_RATE = 1 / 32
_MAX_DRIFT = 0.1
_MAX_BYTES_PER_S = 1e12
_REFERENCE_BYTES = (1 << 20, 1 << 28)


class FitSchedule:
    """Decides when to fit: at 1, 2, 4, … 1024 samples, then every 1024; sooner when predictions are off on average."""

    def __init__(self) -> None:
        self._num_fits = 0
        self._drift = 0.0

    def is_due(self, fit: RobustFit, relative_error: float) -> bool:
        """Take the error of the latest sample's prediction into account; returns whether to fit now."""
        self._drift += _DRIFT_RATE * (max(-1.0, min(1.0, relative_error)) - self._drift)
        interval = min(1 << max(0, self._num_fits - 1), _FIT_INTERVAL)
        is_off = abs(self._drift) > _MAX_DRIFT and fit.has_informative_news
        if fit.num_new < interval and not is_off:
            return False
        self._drift = 0.0
        self._num_fits += 1
        return True


class StepFit:
    """Fits the model of one kind of step."""

    def __init__(self, guess: StepModel) -> None:
        self.model = guess
        self._fit = RobustFit([getattr(guess, weight) for weight in STEP_WEIGHTS])
        self._schedule = FitSchedule()
        self._num_warm_up = NUM_WARM_UP_STEPS

    def add(self, sample: StepSample) -> bool:
        """Take a step into account; returns whether there is a new model."""
        if self._num_warm_up:
            self._num_warm_up -= 1
            return False
        shape = sample.shape
        features = (1, shape.num_prefill_tokens, shape.num_prefill_pairs, shape.num_decodes, shape.num_context_tokens)
        self._fit.add(features, sample.seconds)
        if not self._schedule.is_due(self._fit, sample.seconds / max(self.model.seconds(shape), 1e-9) - 1):
            return False
        weights = dict(zip(STEP_WEIGHTS, self._fit.fit(), strict=True))
        self.model = StepModel(**weights, num_samples=self._fit.num_samples)
        return True


class GapFit:
    """Fits the time in which decoding sequences get a token each, once steps verify drafts.

    A single step says little, since it brings one token or a dozen: sums over `GAP_STEPS` steps are fitted.
    """

    def __init__(self, guess: StepModel) -> None:
        self._fit = StepFit(guess)
        self._has_begun = False
        """Whether a step has verified a draft: before that, the gap is a step."""
        self._num_steps = self._num_decodes = self._num_context_tokens = self._num_accepted = 0
        self._seconds = 0.0

    @property
    def model(self) -> StepModel | None:
        """The model; None before there are enough steps with drafts."""
        return self._fit.model if self._fit.model.is_measured else None

    def add(self, sample: StepSample) -> bool:
        """Take a step that only decodes into account; returns whether there is a new model."""
        self._has_begun |= sample.undrafted is not None
        if not self._has_begun:
            return False
        shape = sample.undrafted or sample.shape
        self._num_steps += 1
        self._num_decodes += shape.num_decodes
        self._num_context_tokens += shape.num_context_tokens
        self._num_accepted += sample.num_accepted
        self._seconds += sample.seconds
        if self._num_steps < GAP_STEPS:
            return False
        num_steps, num_tokens = self._num_steps, self._num_decodes + self._num_accepted
        mean = StepShape(
            num_decodes=round(self._num_decodes / num_steps),
            num_context_tokens=round(self._num_context_tokens / num_steps),
        )
        seconds = self._seconds * self._num_decodes / (num_steps * num_tokens)
        self._num_steps = self._num_decodes = self._num_context_tokens = self._num_accepted = 0
        self._seconds = 0.0
        return self._fit.add(StepSample(shape=mean, seconds=seconds))


class LinkFit:
    """Fits the model of pulls over one link, or of reads from the worker's tiers."""

    def __init__(self, transport: int, memory_s: float = LINK_MEMORY_S) -> None:
        self.transport = transport
        self.memory_s = memory_s
        self.model = GUESSED_LINK
        self.forgotten_s = 0.0
        """When it is forgotten unless there is another pull."""
        self._fit = RobustFit((GUESSED_LINK.latency_s, 1 / GUESSED_LINK.bytes_per_s))
        self._schedule = FitSchedule()

    def add(self, num_bytes: int, seconds: float, *, now_s: float) -> bool:
        """Take a pull into account; returns whether there is a new model."""
        self._fit.add((1, num_bytes), seconds)
        memory_s = max(LINK_MEMORY_S * self._fit.num_samples, self.memory_s)
        self.forgotten_s = now_s + min(memory_s, MAX_LINK_MEMORY_S)
        error = seconds / max(self.model.seconds(num_bytes), 1e-9) - 1
        if self.model.num_samples and not self._schedule.is_due(self._fit, error):
            return False
        latency_s, per_byte_s = self._fit.fit()
        bytes_per_s = 1 / max(per_byte_s, 1 / _MAX_BYTES_PER_S)
        self.model = LinkModel(latency_s=latency_s, bytes_per_s=bytes_per_s, num_samples=self._fit.num_samples)
        return True


class WorkerTiming:
    """Learns from steps, pulls and tiers. Event loop only; O(1) per step, but for an occasional fit of about 1 ms."""

    def __init__(self, *, max_step_tokens: int, clock: Clock, floors: StepFloors | None = None) -> None:
        """`floors` give the first estimates; None: the device was not measured."""
        decode = GUESSED_TIMING.decode if floors is None else floors.decode_estimate
        self._clock = clock
        self._prefill = StepFit(GUESSED_TIMING.prefill if floors is None else floors.prefill_estimate)
        self._decode = StepFit(decode)
        self._gap = GapFit(decode)
        self._links: dict[WorkerId, LinkFit] = {}
        self._memories_s: dict[WorkerId, float] = {}
        """For peers whose links were forgotten: for how long at least the next one is kept."""
        self._any_link = LinkFit(0)
        self._tier_read = LinkFit(0)
        self._max_step_tokens = max_step_tokens
        self.model = self._latest()
        self.version = 0
        """Number of models so far that differed noticeably from the one before."""
        self.busy_s = 0.0
        """Total time in steps."""
        self._sent = self._predictions()

    @property
    def transports(self) -> Mapping[WorkerId, int]:
        """Transport of the last pull from each peer, as a worker_pb2.KvTransport number."""
        return {peer: link.transport for peer, link in self._links.items()}

    @property
    def slowest_links(self) -> Mapping[int, tuple[WorkerId, LinkModel]]:
        """The peer from which pulls are slowest, by number of the transport."""
        slowest: dict[int, tuple[WorkerId, LinkModel]] = {}
        for peer, link in self._links.items():
            _peer, other = slowest.get(link.transport, (peer, link.model))
            if link.model.num_samples and link.model.bytes_per_s <= other.bytes_per_s:
                slowest[link.transport] = peer, link.model
        return slowest

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bandwidth of pulls from any peer; None before it was measured."""
        return self._any_link.model.bytes_per_s if self._any_link.model.num_samples else None

    def change_budget(self, max_step_tokens: int) -> None:
        """Set the largest number of tokens in a step; what was learned stays."""
        self._max_step_tokens = max_step_tokens
        self._renew()

    def observe(self, samples: Iterable[StepSample]) -> None:
        """Learn from finished steps."""
        for sample in samples:
            self.busy_s += sample.seconds
            if sample.shape.num_prefill_tokens:
                is_new = self._prefill.add(sample)
            else:
                is_new = self._decode.add(sample)
                is_new |= self._gap.add(sample)
            if is_new:
                self._renew()

    def observe_pull(self, peer: WorkerId, transport: int, num_bytes: int, seconds: float) -> None:
        """Learn from a pull that waited for nothing but its bytes."""
        link = self._links.get(peer)
        if link is None or link.transport != transport:
            self._links.pop(peer, None)
            if len(self._links) >= MAX_PEERS:
                del self._links[next(iter(self._links))]
            link = self._links[peer] = LinkFit(transport, self._memories_s.pop(peer, LINK_MEMORY_S))
        now_s = self._clock.monotonic()
        is_new = link.add(num_bytes, seconds, now_s=now_s)
        if self._any_link.add(num_bytes, seconds, now_s=now_s) or is_new:
            self._renew()

    def observe_tier_read(self, num_bytes: int, seconds: float) -> None:
        """Learn from a read from the worker's own tiers that waited for nothing but its bytes."""
        if self._tier_read.add(num_bytes, seconds, now_s=self._clock.monotonic()):
            self._renew()

    def forget_links(self) -> None:
        """Forget the links that had no pull for long; they are then predicted like this worker's others.

        Routers avoid a link that was slow, so nothing would ever show that it has recovered.
        """
        now_s = self._clock.monotonic()
        idle = [peer for peer, link in self._links.items() if link.forgotten_s <= now_s]
        if not idle:
            return
        for peer in idle:
            link = self._links.pop(peer)
            if link.model.num_samples * LINK_MEMORY_S < MAX_LINK_MEMORY_S:
                self._memories_s[peer] = min(2 * link.memory_s, MAX_LINK_MEMORY_S)
        while len(self._memories_s) > MAX_PEERS:
            del self._memories_s[next(iter(self._memories_s))]
        if not self._links:
            self._any_link = LinkFit(0)
        self._renew()

    def backlog_s(self, load: EngineLoad, *, now_s: float) -> float:
        """Return the predicted seconds until the prompts in `load` are computed, from now on."""
        if not load.num_pending_prefill_tokens:
            return 0.0
        whole_s = self.model.prompts_s(
            load.num_pending_prefill_tokens,
            load.num_pending_prefill_pairs,
            num_decodes=load.num_decoding,
            num_context_tokens=load.num_context_tokens if load.num_decoding else 0,
        )
        num_steps = self.model.num_prefill_steps(load.num_pending_prefill_tokens, num_decodes=load.num_decoding)
        # Each step brings a new load: at most one has passed since this one, however long ago that was.
        return whole_s - min(max(now_s - load.measured_s, 0.0), whole_s / num_steps)

    def _latest(self) -> TimingModel:
        links: dict[WorkerId | None, LinkModel] = {peer: link.model for peer, link in self._links.items()}
        if links:
            links[None] = self._any_link.model
        return TimingModel(
            prefill=self._prefill.model,
            decode=self._decode.model,
            gap=self._gap.model,
            max_step_tokens=self._max_step_tokens,
            links=links,
            tier_read=self._tier_read.model if self._tier_read.model.num_samples else None,
        )

    def _renew(self) -> None:
        self.model = self._latest()
        predictions = self._predictions()
        if predictions.keys() != self._sent.keys() or any(
            abs(seconds - self._sent[what]) > MIN_CHANGE * self._sent[what] for what, seconds in predictions.items()
        ):
            self._sent = predictions
            self.version += 1

    def _predictions(self) -> dict[object, float]:
        """Return the predicted seconds of the reference steps and pulls by which models are compared."""
        predictions: dict[object, float] = {}
        for shape in reference_shapes(self._max_step_tokens):
            predictions[shape] = self.model.step_s(shape)
            if self.model.gap is not None:
                predictions["gap", shape] = self.model.gap.seconds(shape)
        for num_bytes in _REFERENCE_BYTES:
            for peer, link in self.model.links.items():
                predictions[peer, num_bytes] = link.seconds(num_bytes)
            if self.model.tier_read is not None:
                predictions["tier_read", num_bytes] = self.model.tier_read.seconds(num_bytes)
        # The first measurement is always a change.
        predictions["prefill"] = float(self.model.prefill.is_measured)
        predictions["decode"] = float(self.model.decode.is_measured)
        return predictions


def reference_shapes(max_step_tokens: int) -> list[StepShape]:
    """Return light to heavy steps: chunks of prompts at several depths, with and without decodes, and decodes alone."""
    chunks = [
        StepShape(
            num_prefill_tokens=num_tokens,
            num_prefill_pairs=num_tokens * depth + num_tokens * (num_tokens + 1) // 2,
            num_decodes=num_decodes,
            num_context_tokens=1024 * num_decodes,
        )
        for num_tokens in (max(1, max_step_tokens // 8), max_step_tokens)
        for depth in (0, 8192)
        for num_decodes in (0, 16)
    ]
    decodes = [
        StepShape(num_decodes=num_decodes, num_context_tokens=num_decodes * depth)
        for num_decodes in (1, 16, 64)
        for depth in (256, 4096)
    ]
    return chunks + decodes
