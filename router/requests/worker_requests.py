"""The messages with which an attempt opens its calls to workers."""

import math
import secrets
from dataclasses import dataclass

from common.block_hash import num_usable_blocks
from common.ids import Epoch, HandoffId, WorkerId
from common.structured import TaskTracker
from common.trust.tickets import PullRight, of_blocks, of_handoff
from common.wire_names import PlanKind
from kvrelay.v1 import decode_pb2, prefill_pb2, sequence_pb2
from router.choosing.chooser import Chooser
from router.fleet.booking import Booking, WorkerBooking
from router.fleet.fleet import Fleet
from router.line.admission import Admission
from router.observe.metrics import RouterMetrics
from router.placement.plans import RetainedOn
from router.record.record import Delivery, RunningRequest
from router.requests.sample_group import SampleGroup

CAPABILITY_BYTES = 32
"""Size of the secret with which a client streams from a decode worker (decode_worker/direct.py)."""
DIRECT_TTL_S = 30.0
"""How long a client may take to connect to the decode worker: as long as a connection may take."""
CHECKPOINT_TOKENS = 64
"""Most tokens that are generated again when the worker is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptServices:
    """What the attempts of all requests use of their router."""

    fleet: Fleet
    chooser: Chooser
    admission: Admission
    metrics: RouterMetrics
    tracker: TaskTracker


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerRequests:
    """Makes the messages for some samples of a request under one booked plan."""

    group: SampleGroup
    booking: Booking
    services: AttemptServices
    traceparent: str
    """The attempt's place in a trace, for the workers; empty: it is not traced."""

    @property
    def record(self) -> RunningRequest:
        """The request."""
        return self.group.record

    @property
    def samples(self) -> range:
        """Its samples that are asked for."""
        return self.group.samples

    def decode_request(self, handoff_id: HandoffId) -> decode_pb2.DecodeRequest:
        """Return the call of the decode worker, which pulls the handoff, or computes the prompt in a local plan."""
        decode, prefill = self.booking.answering, self.booking.prefill
        request = decode_pb2.DecodeRequest(
            sequence=self.record.sequence(
                self.samples,
                self._retention(RetainedOn.DECODE),
                tpot_slo_s=decode.tpot_slo_s if decode.bounds_prompts else math.inf,
                prefill_booking=self._prefill_booking(decode) if prefill is None else None,
                traceparent=self.traceparent,
            ),
            handoff=None if prefill is None else self._handoff(prefill, handoff_id),
            epoch=decode.epoch,
            source=self._source(decode) if prefill is None else None,
            direct=_direct_access() if self.record.job.delivery is Delivery.DIRECT else None,
        )
        if self.record.beams is not None:
            request.sequence.beams.CopyFrom(self.record.beams)
        return request

    def prefill_request(self, worker: WorkerBooking, handoff_id: HandoffId) -> prefill_pb2.PrefillRequest:
        """Return the call of the prefill worker that serves the handoff."""
        return prefill_pb2.PrefillRequest(
            sequence=self.record.sequence(
                self.samples,
                self._retention(RetainedOn.PREFILL),
                prefill_booking=self._prefill_booking(worker),
                traceparent=self.traceparent,
            ),
            handoff_id=handoff_id,
            epoch=worker.epoch,
            source=self._source(worker),
        )

    def embedding_request(self) -> prefill_pb2.PrefillRequest:
        """Return the call of the worker that computes an embedding."""
        worker = self.booking.answering
        return prefill_pb2.PrefillRequest(
            sequence=self.record.sequence(
                self.samples, prefill_booking=self._prefill_booking(worker), traceparent=self.traceparent
            ),
            epoch=worker.epoch,
            source=self._source(worker),
        )

    def _retention(self, side: RetainedOn) -> "sequence_pb2.Retention.ValueType":
        """Return how long the worker on this side of a remote plan keeps the blocks.

        An answer of one token ends with the prefill: its decode worker gets no blocks that it could keep.
        """
        plan, ends_with_prefill = self.booking.plan, self.record.job.sampling.max_tokens == 1
        is_retained = plan.kind is PlanKind.LOCAL or plan.retained_on in (RetainedOn.BOTH, side)
        if is_retained or (ends_with_prefill and side is RetainedOn.PREFILL):
            return sequence_pb2.RETENTION_UNSPECIFIED
        return sequence_pb2.RETENTION_BRIEF

    def _prefill_booking(self, computes: WorkerBooking) -> sequence_pb2.PrefillBooking | None:
        max_wait_s = self.booking.plan.max_wait_s
        if max_wait_s == math.inf:
            return None
        return sequence_pb2.PrefillBooking(max_wait_s=max_wait_s, prefill_s=computes.prefill_s)

    def _handoff(self, prefill: WorkerBooking, handoff_id: HandoffId) -> decode_pb2.Handoff:
        """Return where the decode worker pulls the prompt's KV from, with its ticket."""
        source = prefill.member.endpoint.worker_id
        return decode_pb2.Handoff(
            handoff_id=handoff_id,
            prefill_worker_id=source,
            prefill_address=prefill.member.kv_address,
            prefill_epoch=prefill.epoch,
            ticket=self._ticket(self.booking.answering, source, prefill.epoch, of_handoff(handoff_id)),
        )

    def _source(self, computes: WorkerBooking) -> sequence_pb2.KvSource | None:
        """Return where the worker that computes the prompt pulls leading blocks from, with its ticket; None: nowhere.

        The ticket covers exactly the blocks that are asked for. The last token is always computed, so its block is
        left out.
        """
        source, pull = self.booking.source, self.booking.plan.pull
        if source is None or source.facts is None or pull is None:
            return None
        record, epoch = self.record, source.facts.epoch
        output = record.output_of(self.samples)
        num_tokens = len(record.job.prompt_token_ids) + len(output)
        num_blocks = min(pull.num_blocks, num_usable_blocks(num_tokens, record.job.model.block_size))
        subject = of_blocks(record.job.hashes(output)[:num_blocks].packed)
        return sequence_pb2.KvSource(
            worker_id=pull.source,
            address=source.kv_address,
            epoch=epoch,
            num_blocks=num_blocks,
            ticket=self._ticket(computes, pull.source, epoch, subject),
        )

    def _ticket(self, puller: WorkerBooking, source: WorkerId, epoch: Epoch, subject: str) -> str:
        """Return the ticket with which a worker pulls from one life of another."""
        puller_id = puller.member.endpoint.worker_id
        right = PullRight(puller=puller_id, source=source, epoch=epoch, subject=subject, tenant=self.record.tenant.name)
        return self.services.fleet.issue(right)


def _direct_access() -> decode_pb2.DirectAccess:
    return decode_pb2.DirectAccess(
        capability=secrets.token_bytes(CAPABILITY_BYTES),
        ttl_s=DIRECT_TTL_S,
        checkpoint_tokens=CHECKPOINT_TOKENS,
    )
