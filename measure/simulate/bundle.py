"""Bundles the tokens of a request: behind its first ones they go out as one run, with the last one at the latest.

What is reported about their times does not come from the messages: the token log hears of every token when it comes.
"""

from array import array

from common.tokens import TokenArray
from engine.events import EngineEvent, Failed, FinishReason, TokenRun, Tokens
from engine.group import Group

_NUM_SWEPT = 256


class KeptTokens:
    """Tokens of one engine that wait for more of their request; with text, or several samples, none ever does."""

    def __init__(self) -> None:
        self._runs: dict[Group, tuple[int, TokenArray]] = {}
        self._num_before_sweep = _NUM_SWEPT

    def take(self, group: Group, event: EngineEvent) -> list[EngineEvent]:
        """Return what is to go out now."""
        if not isinstance(event, Tokens) or group.request.sampling.detokenize or len(group.sequences) != 1:
            if isinstance(event, Failed):
                self._runs.pop(group, None)
            return [event]
        if event.runs:
            return [event]
        if event.prefill_s is not None:  # behind kept ones only when the prompt was computed again
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
        if len(self._runs) >= self._num_before_sweep:  # whoever was cancelled never asks for its tokens
            self._runs = {other: run for other, run in self._runs.items() if not other.is_over}
            self._num_before_sweep = _NUM_SWEPT + 2 * len(self._runs)
        self._runs[group] = first_token_index, token_ids[:]

    def flush(self, group: Group, finish_reason: FinishReason | None) -> Tokens:
        """Return a request's run."""
        first_token_index, token_ids = self._runs.pop(group)
        run = TokenRun(
            sample_index=group.leader.sample_index,
            first_token_index=first_token_index,
            token_ids=token_ids,
            finish_reason=finish_reason,
        )
        return Tokens(runs=(run,))

    def flush_all(self) -> list[tuple[Group, EngineEvent]]:
        """Return the runs of all requests that go on."""
        return [(group, self.flush(group, None)) for group in list(self._runs) if not group.is_over]
