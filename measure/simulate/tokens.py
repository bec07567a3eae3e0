"""Tokens on their way from an engine: when each was generated, and which of them still wait for more of their request.

After its first token a request's tokens go out as one run, at the latest with the last one. Reported times do not come
from these messages: engines note every token in the `TokenLog`.
"""

from array import array
from collections.abc import Sequence

from common.ids import RequestId
from common.tokens import TokenArray
from common.wire_names import FinishReason
from engine.events import EngineEvent, Failed, GeneratedRun, Tokens
from engine.steps.group import Group

_NUM_SWEPT = 256


class TokenLog:
    """Times at which the tokens of running requests were generated, by whichever engine."""

    def __init__(self) -> None:
        self._times_s: dict[RequestId, array[float]] = {}

    def note(self, request_id: RequestId, first_index: int, times_s: Sequence[float]) -> None:
        """Note the times of consecutive tokens, at least one; tokens generated again after a failure do not count."""
        known = self._times_s.setdefault(request_id, array("d"))
        known.extend([times_s[0]] * (first_index - len(known)))  # tokens that came with the request
        known.extend(times_s[len(known) - first_index :])

    def take(self, request_id: RequestId) -> Sequence[float]:
        """Return the times of a request's tokens, by index, and forget them."""
        return self._times_s.pop(request_id, array("d"))


class KeptTokens:
    """Tokens of one engine that wait for more of their request; those of text and of several samples never wait."""

    def __init__(self) -> None:
        self._runs: dict[Group, tuple[int, TokenArray]] = {}
        self._num_before_sweep = _NUM_SWEPT

    def take(self, group: Group, event: EngineEvent) -> list[EngineEvent]:
        """Return the events that go out now."""
        if not isinstance(event, Tokens) or group.request.sampling.detokenize or len(group.sequences) != 1:
            if isinstance(event, Failed):
                self._runs.pop(group, None)
            return [event]
        if event.runs:
            return [event]
        if event.prefill_s is not None:  # kept tokens precede it only when the prompt was computed again
            return [self.flush(group, None), event] if group in self._runs else [event]
        (output,) = event.tokens
        self.extend(group, output.token_index, array("I", (output.token_id,)))
        return [] if output.finish_reason is None else [self.flush(group, output.finish_reason)]

    def extend(self, group: Group, first_token_index: int, token_ids: TokenArray) -> None:
        """Keep more tokens of a request."""
        kept = self._runs.get(group)
        if kept is not None:
            kept[1].extend(token_ids)
            return
        if len(self._runs) >= self._num_before_sweep:  # cancelled requests never flush their tokens
            self._runs = {other: run for other, run in self._runs.items() if not other.is_over}
            self._num_before_sweep = _NUM_SWEPT + 2 * len(self._runs)
        self._runs[group] = first_token_index, token_ids[:]

    def flush(self, group: Group, finish_reason: FinishReason | None) -> Tokens:
        """Return a request's run and keep it no longer."""
        first_token_index, token_ids = self._runs.pop(group)
        run = GeneratedRun(
            sample_index=group.leader.sample_index,
            first_token_index=first_token_index,
            token_ids=token_ids,
            finish_reason=finish_reason,
        )
        return Tokens(runs=(run,))

    def flush_all(self) -> list[tuple[Group, EngineEvent]]:
        """Return the runs of all requests that are not over."""
        return [(group, self.flush(group, None)) for group in list(self._runs) if not group.is_over]
