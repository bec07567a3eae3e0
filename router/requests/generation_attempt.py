"""One attempt at an answer: the calls to the workers of a plan, from reservation to the last token.

Remote plan:
1. Decode(D) opens with the handoff; D grants pages (`reserved`) or refuses, and begins to fetch from P.
2. Prefill(P) opens. P computes; D pulls block by block meanwhile.
3. P returns the first token of each sample, which goes to the client at once. Until 4, the loss of P ends the attempt.
4. D has verified the manifest (`transferred`) and sends the tokens after the first, until every sample has ended.

Local plan: 1 without a handoff; D computes the prompt and sends every token.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from common.errors import EngineFault, KvrelayError, WorkerLost
from common.ids import HandoffId, mint_handoff_id
from common.lifecycle import State
from common.token_batches import runs_of
from kvrelay.v1 import decode_pb2, inference_pb2, prefill_pb2, sequence_pb2
from router.fleet.booking import WorkerBooking
from router.fleet.worker_client import Incoming
from router.requests.attempt import Attempt, AttemptFailed, AttemptOutcome, blaming, receive

RESERVATION_TIMEOUT_S = 30.0
"""How long a decode worker that sends heartbeats may take to grant pages: before that, grammars are compiled and
prefixes are pulled. One that no other can replace may take longer."""
END_OF_STREAM_TIMEOUT_S = 1.0
"""How long a worker may take to close a call after its last token."""
Answer: TypeAlias = Incoming[decode_pb2.DecodeResponse]


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationAttempt(Attempt):
    """Runs one booked plan, remote or local, for an answer. It ends early when its decode worker is leaving."""

    _access: decode_pb2.DirectAccess | None = None
    """Set when the client streams its tokens from the decode worker itself."""
    _outcome: AttemptOutcome | None = None
    """Known once the decode worker's messages settle it; None while the attempt runs."""
    _has_transferred: asyncio.Event = field(default_factory=asyncio.Event)

    async def _run(self) -> AttemptOutcome:
        decode, prefill = self.booking.answering, self.booking.prefill
        self.life.advance(State.RESERVING)
        handoff_id = mint_handoff_id()
        request = self.decode_request(handoff_id)
        self._access = request.direct if request.HasField("direct") else None
        with decode.member.client.decode(request) as answer:
            try:
                await self._reserve(answer)
            except AttemptFailed:
                if prefill is not None:
                    prefill.member.end_use(prefill)  # it was never called
                raise
            if prefill is None:
                await self._follow(answer, self._take_local)
            else:
                await self._prefill_and_decode(prefill, handoff_id, answer)
        missing = self._unfinished()
        if not missing:
            return AttemptOutcome.COMPLETED
        if self._outcome is AttemptOutcome.MOVED:
            return AttemptOutcome.MOVED
        raise AttemptFailed(decode, EngineFault(f"the stream ended before samples {missing} did"))

    async def _reserve(self, answer: Answer) -> None:
        decode = self.booking.answering
        response = await self._first_message(answer, decode)
        if response is None or not response.HasField("reserved"):
            raise AttemptFailed(decode, EngineFault("the first message of a decode call is not a reservation"))
        self.record.compile_s += response.reserved.compile_s
        if self.booking.prefill is not None and not self.record.ledger.has_tokens:
            num_prompt_tokens = len(self.record.job.prompt_token_ids)
            self.record.num_decode_cached_tokens = min(response.reserved.num_cached_tokens, num_prompt_tokens)
        self._send_plan()
        if self._access is not None:
            grant = inference_pb2.DirectGrant(
                address=decode.member.direct_address,
                capability=self._access.capability,
                attempt=self.number,
                server_name=decode.member.direct_name,
            )
            self.record.outbox.put(inference_pb2.GenerateResponse(direct=grant))

    async def _first_message(self, answer: Answer, decode: WorkerBooking) -> decode_pb2.DecodeResponse | None:
        """Return the first message; raises AttemptFailed when it takes too long and another worker could send it."""
        while True:
            try:
                async with asyncio.timeout(RESERVATION_TIMEOUT_S):
                    return await receive(answer, decode)
            except TimeoutError:
                if self.services.fleet.has_another(decode.member):
                    error = WorkerLost(f"it has granted no pages for {RESERVATION_TIMEOUT_S:g} s")
                    raise AttemptFailed(decode, error) from None

    # Remote plan.

    async def _prefill_and_decode(self, prefill: WorkerBooking, handoff_id: HandoffId, answer: Answer) -> None:
        has_first_tokens = asyncio.Event()
        async with self.services.tracker.owned(
            self._prefill(prefill, handoff_id, has_first_tokens), self._decode_after(has_first_tokens, answer)
        ) as (prefilling, decoding):
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            for task in (prefilling, decoding):
                if task.done():
                    task.result()
            # No decoding is needed when the first token is the last one. A prefill call that is still open then ends
            # with the block, and the handoff with it.
            if prefilling.done() and self._unfinished():
                await self._until_transferred(prefill, decoding)
                await decoding

    async def _until_transferred(self, prefill: WorkerBooking, decoding: "asyncio.Task[None]") -> None:
        """Wait until the decode worker has the KV. Raises AttemptFailed when the prefill worker falls silent before.

        Its call has ended by then, and the decode worker, which still pulls from it, would notice it seconds later.
        """
        transferred = asyncio.ensure_future(self._has_transferred.wait())
        try:
            with prefill.member.client.loss() as lost:
                await asyncio.wait((decoding, transferred, lost), return_when=asyncio.FIRST_COMPLETED)
                if lost.done() and not (decoding.done() or transferred.done()):
                    raise AttemptFailed(prefill, lost.result())
        finally:
            transferred.cancel()

    async def _prefill(self, prefill: WorkerBooking, handoff_id: HandoffId, has_first_tokens: asyncio.Event) -> None:
        request = self.prefill_request(prefill, handoff_id)
        with prefill.member.client.prefill(request, timeout_s=self._time_left_s()) as answer:
            while (response := await receive(answer, prefill)) is not None:
                if response.HasField("started"):
                    self.record.compile_s += response.started.compile_s
                    self._note_started(response.started)
                elif response.HasField("finished") and not has_first_tokens.is_set():
                    self._take_first_tokens(prefill, response.finished)
                    has_first_tokens.set()
        if not has_first_tokens.is_set():
            raise AttemptFailed(prefill, EngineFault("the prefill ended without a first token"))

    def _take_first_tokens(self, prefill: WorkerBooking, finished: prefill_pb2.PrefillFinished) -> None:
        prefill.member.note_prefilled(prefill)
        self._enter_prefilling()
        if not self.record.ledger.has_tokens:
            self.record.prefill_s = finished.prefill_s
        self.life.advance(State.HANDOFF)
        batch = decode_pb2.TokenBatch()
        if self.record.job.sampling.detokenize:
            batch.tokens.extend(finished.first_tokens)
        else:
            batch.runs.extend(runs_of(finished.first_tokens))
        with blaming(prefill):
            self.record.deliver(batch, expected=self.samples, prompt_logprobs=finished.prompt_logprobs)
        self._note_pinned(finished.num_pinned_tokens)
        self._note_first_token()

    async def _decode_after(self, has_first_tokens: asyncio.Event, answer: Answer) -> None:
        """Follow the decode worker. Its tokens come after the first ones, so they wait until those are delivered."""
        response = await receive(answer, self.booking.answering)
        await has_first_tokens.wait()
        if response is not None:
            self._take_decoded(response)
            if self._outcome is None:
                await self._follow(answer, self._take_decoded)

    def _take_decoded(self, response: decode_pb2.DecodeResponse) -> None:
        self._enter_decoding()
        if response.HasField("tokens"):
            self._deliver(response.tokens)
        elif response.HasField("beams"):
            self._keep_beams(response.beams)
        elif response.HasField("transferred"):
            self.record.add_transfer(response.transferred)
            self.services.chooser.expect(self.booking.plan.answering, self.booking.hashes)

    # Local plan.

    def _take_local(self, response: decode_pb2.DecodeResponse) -> None:
        if response.HasField("tokens"):
            if self.life.state is not State.DECODING:
                self._enter_prefilling()
                self.booking.answering.member.note_prefilled(self.booking.answering)
                self._enter_decoding()
                if not self.record.ledger.has_tokens:
                    self.record.prefill_s = response.tokens.prefill_s
            self._deliver(response.tokens)
        elif response.HasField("beams"):
            self._keep_beams(response.beams)
        elif response.HasField("prefill_started"):
            self._note_started(response.prefill_started)

    # Both.

    def _deliver(self, batch: decode_pb2.TokenBatch) -> None:
        """Deliver tokens of the decode worker and note when they settle the outcome. Raises AttemptFailed."""
        try:
            take = self.record.deliver if self._access is None else self.record.note_checkpoint
            has_end = take(batch, expected=self.samples)
            self._note_drafts(batch)
            self._note_pinned(batch.num_pinned_tokens)
        except KvrelayError as error:
            raise AttemptFailed(self.booking.answering, error) from error
        self._note_first_token()  # of a local plan; a remote one has had it by now
        if has_end and not self._unfinished():
            self._outcome = AttemptOutcome.COMPLETED
        elif self._must_move():
            self._outcome = AttemptOutcome.MOVED

    def _must_move(self) -> bool:
        """Return whether the decode worker is leaving; the attempt then ends after the next token."""
        return self.services.fleet.is_leaving(self.booking.answering.member)

    def _note_drafts(self, batch: decode_pb2.TokenBatch) -> None:
        """Count drafts for the request and for this attempt."""
        for counts in (self.record, self.booking.decision):
            counts.num_drafted_tokens += batch.num_drafted_tokens
            counts.num_accepted_tokens += batch.num_accepted_tokens

    def _keep_beams(self, beams: sequence_pb2.BeamState) -> None:
        """Keep the state of a beam search, from which the next attempt goes on."""
        self.record.beams = beams
        if self._must_move():
            self._outcome = AttemptOutcome.MOVED

    async def _follow(self, answer: Answer, take: Callable[[decode_pb2.DecodeResponse], None]) -> None:
        """Take messages until the outcome is known; after the last token, wait shortly for a good end."""

        def settles(response: decode_pb2.DecodeResponse) -> bool:
            take(response)
            return self._outcome is not None

        with blaming(self.booking.answering):
            await answer.follow(settles)
        if self._unfinished():
            if self._must_move():
                self._outcome = AttemptOutcome.MOVED
            return
        with suppress(TimeoutError, KvrelayError):
            async with asyncio.timeout(END_OF_STREAM_TIMEOUT_S):
                while await answer.receive() is not None:
                    pass

    def _enter_decoding(self) -> None:
        if self.life.state is not State.DECODING:
            self.life.advance(State.DECODING)
            self._has_transferred.set()
            if (prefill := self.booking.prefill) is not None:
                prefill.member.end_use(prefill)  # its blocks have been fetched and verified
