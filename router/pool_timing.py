"""Timing models for workers with too few measurements of their own: those of their pool."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from common.ids import WorkerId
from common.timing import (
    GUESSED_TIMING,
    TYPICAL_BATCH,
    TYPICAL_CHUNK,
    LinkModel,
    StepModel,
    TimingModel,
    median_model,
)
from kvrelay.v1 import worker_pb2
from router.member import Member

MIN_SAMPLES = 8
"""A model fitted to fewer steps is not used."""
NUM_LATEST = 15
"""Latest models of a pool, whose median is used."""

_TRANSFER_BYTES = 64 << 20


class PoolTiming:
    """The latest measured models of each pool; completes the model of a worker with the median of its pool.

    The median is the whole model of the worker whose prediction is the median, because medians of single weights would
    describe no worker. Prefill workers never decode and decode workers rarely prefill, so the other pool may have what
    one pool has not measured. Links are similar: decode workers pull every handoff, prefill workers only when a pull
    looks worthwhile.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, str], deque[tuple[WorkerId, StepModel]]] = {}

    def take(self, member: Member, reported: TimingModel, members: Iterable[Member]) -> None:
        """Take the measured parts of a worker's model, and complete all `members` again."""
        member.reported_timing = reported
        role, worker_id = member.endpoint.role, member.endpoint.worker_id
        for kind, model in (("prefill", reported.prefill), ("decode", reported.decode)):
            if model.num_samples >= MIN_SAMPLES:
                latest = self._latest.setdefault((role, kind), deque(maxlen=NUM_LATEST))
                for known in [known for known in latest if known[0] == worker_id]:
                    latest.remove(known)
                latest.append((worker_id, model))
        self.complete(members)

    def complete(self, members: Iterable[Member]) -> None:
        """Give every worker the best available model: its own, its pool's, the other pool's, the guess."""
        usual = {
            (role, kind): self._usual(role, kind)
            for role in (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
            for kind in ("prefill", "decode")
        }
        members = list(members)
        link = self._usual_link(members)
        for member in members:
            reported, role = member.reported_timing, member.endpoint.role
            own = GUESSED_TIMING if reported is None else reported
            timing = replace(
                own,
                prefill=own.prefill if own.prefill.num_samples >= MIN_SAMPLES else usual[role, "prefill"],
                decode=own.decode if own.decode.num_samples >= MIN_SAMPLES else usual[role, "decode"],
                links=own.links or ({} if link is None else {None: link}),
            )
            if timing != member.timing:
                member.take_timing(timing)

    def _usual_link(self, members: Iterable[Member]) -> LinkModel | None:
        reported = [member.reported_timing.links.get(None) for member in members if member.reported_timing is not None]
        links = [link for link in reported if link is not None]
        return median_model(links, lambda link: link.seconds(_TRANSFER_BYTES)) if links else None

    def _usual(self, role: int, kind: str) -> StepModel:
        shape = TYPICAL_CHUNK if kind == "prefill" else TYPICAL_BATCH
        other = worker_pb2.WORKER_ROLE_PREFILL + worker_pb2.WORKER_ROLE_DECODE - role
        for pool in (role, other):
            latest = self._latest.get((pool, kind))
            if latest:
                return median_model([model for _id, model in latest], lambda model: model.seconds(shape))
        return GUESSED_TIMING.prefill if kind == "prefill" else GUESSED_TIMING.decode
