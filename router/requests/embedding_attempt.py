"""One attempt at an embedding: a single Prefill call, without a reservation and without a handoff.

1. Prefill(P) opens with `sequence.pooling`; P refuses, or begins when its engine takes the prompt (`started`).
2. P returns the pooled hidden states with its last message. Nothing is kept there but the cached blocks.
"""

import numpy as np

from common.errors import EngineFault
from common.lifecycle import State
from common.wire import unpack_floats
from kvrelay.v1 import prefill_pb2
from router.record.embedding import Floats
from router.requests.attempt import Attempt, AttemptFailed, AttemptOutcome, receive


class EmbeddingAttempt(Attempt):
    """Runs one booked plan for an embedding. A worker that leaves still finishes it."""

    async def _run(self) -> AttemptOutcome:
        worker = self.booking.answering
        self.life.advance(State.RESERVING)
        with worker.member.client.prefill(self.embedding_request(), timeout_s=self._time_left_s()) as answer:
            while (response := await receive(answer, worker)) is not None:
                if response.HasField("started"):
                    self._send_plan()
                    self._note_started(response.started)
                elif response.HasField("finished"):
                    self._take(response.finished)
        if self._unfinished():
            raise AttemptFailed(worker, EngineFault("the prefill ended without an embedding"))
        return AttemptOutcome.COMPLETED

    def _take(self, finished: prefill_pb2.PrefillFinished) -> None:
        """Deliver the embedding. Raises AttemptFailed for a wrong length or numbers that are not finite."""
        worker = self.booking.answering
        worker.member.note_prefilled(worker)
        self.record.prefill_s = finished.prefill_s
        self.record.deliver_embedding(self._vector(finished.embedding))
        self._note_first_token()

    def _vector(self, raw: bytes) -> Floats:
        size = self.record.job.model.hidden_size
        if len(raw) == 4 * size:
            vector = unpack_floats(raw)
            if np.isfinite(vector).all():
                return vector
        raise AttemptFailed(self.booking.answering, EngineFault(f"{len(raw)} bytes are not {size} finite numbers"))
