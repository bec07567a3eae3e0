"""One attempt at a plan: the calls to its workers, from reservation to the last token.

Remote plan:
1. Decode(D) opens with the handoff; D grants pages (`reserved`) or refuses, and begins to fetch from P.
2. Prefill(P) opens. P computes; D pulls block by block meanwhile.
3. P returns the first token of each sample: to the client at once.
4. D has verified the manifest (`transferred`) and sends the tokens after the first, until every sample has ended.

Local plan: 1 without a handoff; D computes the prompt and sends every token.

Both calls belong to the attempt: when one fails, or the client goes away, the other is closed in the same turn.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from common.errors import EngineFault, KvrelayError
from common.ids import Epoch, HandoffId, WorkerId, mint_handoff_id
from common.lifecycle import LifeCycle, State
from common.structured import TaskCensus
from common.token_batches import runs_of
from common.trust.tickets import IssueTicket, PullRight, of_blocks, of_handoff
from kvrelay.v1 import decode_pb2, inference_pb2, prefill_pb2, sequence_pb2
from router.booking import Booking
from router.direct import direct_access
from router.explain import plan_to_proto
from router.member import Hold
from router.metrics import RouterMetrics
from router.placement.plans import Keeper, Plan, PlanKind
from router.record import Delivery, RequestRecord
from router.worker_client import Incoming

END_OF_STREAM_TIMEOUT_S = 1.0
"""How long a worker may take to close a call after its last token."""

Answer: TypeAlias = Incoming[decode_pb2.DecodeResponse]
_Response = TypeVar("_Response")


class AttemptFailed(Exception):
    """A worker's call failed, or a worker broke the protocol."""

    def __init__(self, hold: Hold, error: KvrelayError) -> None:
        super().__init__(f"{hold.member.endpoint.worker_id}: {error.message}")
        self.hold = hold
        self.error = error


class AttemptMoved(Exception):
    """The decode worker is about to go. Nothing has failed: the rest of the answer needs another plan."""


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """Runs one booked plan for some samples of a request."""

    record: RequestRecord
    samples: range
    life: LifeCycle
    """Of these samples; the request's own for its leading ones."""
    booking: Booking
    number: int
    metrics: RouterMetrics
    census: TaskCensus
    on_started: Callable[[int], None]
    """Hears how many tokens of the prompt were found in the cache, once its computation begins."""
    on_transferred: Callable[[], None]
    """Hears that the decode worker holds the blocks of all known tokens."""
    must_move: Callable[[], bool]
    """Whether the decode worker is about to go: the attempt then ends behind the next token."""
    issue: IssueTicket
    tenant: str
    _access: decode_pb2.DirectAccess | None = None
    """Set: the client gets the decode worker's tokens from there."""
    num_gaps_before: int = 0
    """Gaps between tokens before the first token of this attempt, and the gap that ended with it."""

    async def run(self) -> None:
        """Deliver every missing token of the samples. Raises AttemptFailed, AttemptMoved."""
        try:
            await self._run()
        finally:
            decision = self.booking.decision
            if decision.ttft_s is not None:
                decision.mean_itl_s = self.record.ledger.mean_gap_s(skip=self.num_gaps_before)

    async def _run(self) -> None:
        decode, prefill = self.booking.decode, self.booking.prefill
        self.life.advance(State.RESERVING)
        if self.record.job.delivery is Delivery.DIRECT:
            self._access = direct_access()
        handoff_id = mint_handoff_id()
        request = decode_pb2.DecodeRequest(
            sequence=self.record.sequence(self.samples, _retention(self.booking.plan, Keeper.DECODE)),
            handoff=None if prefill is None else self._handoff(prefill, handoff_id),
            epoch=decode.epoch,
            source=self._source(decode) if prefill is None else None,
            direct=self._access,
        )
        with decode.member.client.decode(request) as answer:
            await self._reserve(answer)
            if prefill is None:
                await self._decode_locally(answer)
            else:
                await self._prefill_and_decode(prefill, handoff_id, answer)
        if missing := self._unfinished():
            raise AttemptFailed(decode, EngineFault(f"the stream ended before samples {missing}"))

    async def _reserve(self, answer: Answer) -> None:
        decode = self.booking.decode
        response = await _receive(answer, decode)
        if response is None or not response.HasField("reserved"):
            raise AttemptFailed(decode, EngineFault("the first message does not tell of a reservation"))
        if self.booking.prefill is not None and not self.record.ledger.has_tokens:
            num_prompt_tokens = len(self.record.job.prompt_token_ids)
            self.record.num_decode_cached_tokens = min(response.reserved.num_cached_tokens, num_prompt_tokens)
        self.record.num_attempts = max(self.record.num_attempts, self.number)
        chosen = plan_to_proto(self.booking.plan, attempt=self.number)
        self.record.outbox.put(inference_pb2.GenerateResponse(plan=chosen))
        if self._access is not None:
            grant = inference_pb2.DirectGrant(
                address=decode.member.direct_address,
                capability=self._access.capability,
                attempt=self.number,
                server_name=decode.member.direct_name,
            )
            self.record.outbox.put(inference_pb2.GenerateResponse(direct=grant))

    def _handoff(self, prefill: Hold, handoff_id: HandoffId) -> decode_pb2.Handoff:
        """Return where the decode worker pulls the prompt's KV from, and its right to."""
        source = prefill.member.endpoint.worker_id
        right = PullRight(
            puller=self.booking.decode.member.endpoint.worker_id,
            source=source,
            epoch=prefill.epoch,
            subject=of_handoff(handoff_id),
            tenant=self.tenant,
        )
        return decode_pb2.Handoff(
            handoff_id=handoff_id,
            prefill_worker_id=source,
            prefill_address=prefill.member.kv_address,
            prefill_epoch=prefill.epoch,
            ticket=self.issue(right),
        )

    def _source(self, computes: Hold) -> sequence_pb2.KvSource | None:
        """Return where the worker that computes the prompt pulls leading blocks from, and its right to; None: nowhere.

        The ticket is for exactly the blocks that are asked for, so the last token's, which is computed, is left out.
        """
        source = self.booking.source
        if source is None:
            return None
        record = self.record
        output = record.output_of(self.samples)
        num_tokens = len(record.job.prompt_token_ids) + len(output)
        num_blocks = min(source.num_blocks, (num_tokens - 1) // record.job.model.block_size)
        right = PullRight(
            puller=computes.member.endpoint.worker_id,
            source=WorkerId(source.worker_id),
            epoch=Epoch(source.epoch),
            subject=of_blocks(record.job.hashes(output)[:num_blocks].packed),
            tenant=self.tenant,
        )
        return sequence_pb2.KvSource(
            worker_id=source.worker_id,
            address=source.address,
            epoch=source.epoch,
            num_blocks=num_blocks,
            ticket=self.issue(right),
        )

    # Remote plan.

    async def _prefill_and_decode(self, prefill: Hold, handoff_id: HandoffId, answer: Answer) -> None:
        has_first_tokens = asyncio.Event()
        async with self.census.owned(
            self._prefill(prefill, handoff_id, has_first_tokens), self._decode_after(has_first_tokens, answer)
        ) as (prefilling, decoding):
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            for task in (prefilling, decoding):
                if task.done():
                    task.result()
            # A first token that is the last one needs no decoding; and a prefill call that
            # stays open after the last token is not waited for.
            if prefilling.done() and self._unfinished():
                await decoding

    async def _prefill(self, prefill: Hold, handoff_id: HandoffId, has_first_tokens: asyncio.Event) -> None:
        request = prefill_pb2.PrefillRequest(
            sequence=self.record.sequence(self.samples, _retention(self.booking.plan, Keeper.PREFILL)),
            handoff_id=handoff_id,
            epoch=prefill.epoch,
            source=self._source(prefill),
        )
        with prefill.member.client.prefill(request, timeout_s=self._time_left_s()) as answer:
            while (response := await _receive(answer, prefill)) is not None:
                if response.HasField("started"):
                    self._note_started(prefill, response.started)
                elif response.HasField("finished") and not has_first_tokens.is_set():
                    self._take_first_tokens(prefill, response.finished)
                    has_first_tokens.set()
        if not has_first_tokens.is_set():
            raise AttemptFailed(prefill, EngineFault("the prefill ended without a first token"))

    def _take_first_tokens(self, prefill: Hold, finished: prefill_pb2.PrefillFinished) -> None:
        prefill.member.note_prefilled(prefill)
        self._enter_prefilling()
        if not self.record.ledger.has_tokens:
            self.record.prefill_s = finished.prefill_s
        self.life.advance(State.HANDOFF)
        batch = decode_pb2.TokenBatch(prompt_logprobs=finished.prompt_logprobs)
        if self.record.job.sampling.detokenize:
            batch.tokens.extend(finished.first_tokens)
        else:
            batch.runs.extend(runs_of(finished.first_tokens))
        with _blaming(prefill):
            self.record.deliver(batch, expected=self.samples)
        self._note_first_token()

    async def _decode_after(self, has_first_tokens: asyncio.Event, answer: Answer) -> None:
        """Follow the decode worker; what it sends waits until the first tokens are out, for it comes after them."""
        response = await _receive(answer, self.booking.decode)
        await has_first_tokens.wait()
        if response is not None:
            if self._take_decoded(response):
                self._move_if_due()
            else:
                await self._follow(answer, self._take_decoded)

    def _take_decoded(self, response: decode_pb2.DecodeResponse) -> bool:
        self._enter_decoding()
        if response.HasField("tokens"):
            return self._deliver(response.tokens)
        if response.HasField("transferred"):
            self.record.add_transfer(response.transferred)
            self.on_transferred()
        return False

    # Local plan.

    async def _decode_locally(self, answer: Answer) -> None:
        await self._follow(answer, self._take_local)

    def _take_local(self, response: decode_pb2.DecodeResponse) -> bool:
        if response.HasField("tokens"):
            if self.life.state is not State.DECODING:
                self._enter_prefilling()
                self.booking.decode.member.note_prefilled(self.booking.decode)
                self._enter_decoding()
                if not self.record.ledger.has_tokens:
                    self.record.prefill_s = response.tokens.prefill_s
            return self._deliver(response.tokens)
        if response.HasField("prefill_started"):
            self._note_started(self.booking.decode, response.prefill_started)
        return False

    # Both.

    def _deliver(self, batch: decode_pb2.TokenBatch) -> bool:
        """Deliver tokens of the decode worker; returns whether every sample has ended. Raises AttemptFailed."""
        try:
            take = self.record.deliver if self._access is None else self.record.note_checkpoint
            has_end = take(batch, expected=self.samples)
        except KvrelayError as error:
            raise AttemptFailed(self.booking.decode, error) from error
        self._note_first_token()  # of a local plan; a remote one has had it by now
        return (has_end and not self._unfinished()) or self.must_move()

    async def _follow(self, answer: Answer, handle: Callable[[decode_pb2.DecodeResponse], bool]) -> None:
        """Take messages until every sample has ended; then only a good end is waited for, and not long."""
        with _blaming(self.booking.decode):
            await answer.follow(handle)
        if self._unfinished():
            self._move_if_due()
            return
        with suppress(TimeoutError, KvrelayError):
            async with asyncio.timeout(END_OF_STREAM_TIMEOUT_S):
                while await answer.receive() is not None:
                    pass

    def _move_if_due(self) -> None:
        """End the attempt when its decode worker is about to go and samples are left. Raises AttemptMoved."""
        if self.must_move() and self._unfinished():
            raise AttemptMoved

    def _note_started(self, hold: Hold, started: prefill_pb2.PrefillStarted | decode_pb2.LocalPrefillStarted) -> None:
        self._enter_prefilling()
        self.metrics.compare_cached_tokens(
            predicted=self.booking.plan.predicted_cached_tokens, actual=started.num_cached_tokens
        )
        self.booking.decision.num_cached_tokens = started.num_cached_tokens
        if not self.record.ledger.has_tokens:
            # Of an answer that another router began, output tokens may be cached, too.
            num_cached_tokens = min(started.num_cached_tokens, len(self.record.job.prompt_token_ids))
            self.record.num_cached_tokens = num_cached_tokens
            self.record.num_pulled_tokens = min(started.num_pulled_tokens, num_cached_tokens)
            self.on_started(num_cached_tokens)

    def _note_first_token(self) -> None:
        """Note, once, when the first token came; gaps between tokens count from here on."""
        decision = self.booking.decision
        if decision.ttft_s is None:
            decision.ttft_s = self.record.clock.monotonic() - decision.decided_s
            self.num_gaps_before = len(self.record.ledger.gaps)

    def _enter_prefilling(self) -> None:
        if self.life.state is State.RESERVING:
            self.life.advance(State.PREFILLING)

    def _enter_decoding(self) -> None:
        if self.life.state is not State.DECODING:
            self.life.advance(State.DECODING)
            if (prefill := self.booking.prefill) is not None:
                prefill.member.end_use(prefill)  # its blocks have been fetched and verified

    def _unfinished(self) -> list[int]:
        return self.record.ledger.unfinished(self.samples)

    def _time_left_s(self) -> float:
        return max(self.record.deadline_s - asyncio.get_running_loop().time(), 0.001)


def _retention(plan: Plan, side: Keeper) -> "sequence_pb2.Retention.ValueType":
    """Return how long the worker on this side of a remote plan keeps the blocks."""
    is_keeper = plan.kind is PlanKind.LOCAL or plan.keeper in (Keeper.BOTH, side)
    return sequence_pb2.RETENTION_UNSPECIFIED if is_keeper else sequence_pb2.RETENTION_BRIEF


@contextmanager
def _blaming(hold: Hold) -> Iterator[None]:
    try:
        yield
    except KvrelayError as error:
        raise AttemptFailed(hold, error) from error


async def _receive(answer: Incoming[_Response], hold: Hold) -> _Response | None:
    with _blaming(hold):
        return await answer.receive()
