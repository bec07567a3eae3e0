"""Recorded sessions of agents: prompts that grow, pauses for tools and people, sub-agents beside their parents.

A recording has lengths, times and the prefixes that prompts share, and no text (`measure.workload.session_files`).

A prompt that keeps all of an earlier one begins with its answer too, as far as it grew by that much. A request waits
for the one before of its agent, the first of a sub-agent for the last answer of its parent before it, and the parent
for sub-agents that had ended when it went on.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from measure.workload.playing import cut_segment
from measure.workload.sessions import Beginning, Segment, Turn

BLOCK_SIZE = 64
"""Tokens of a block id, where a file does not say."""
MAX_REQUESTS = 1 << 12
"""Requests of a session at most: to know what each waits for takes time and memory with their square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """A session as recorded. The contents of its segments are small numbers, its own."""

    name: str
    num_tool_tokens: int
    num_system_tokens: int
    """Tokens of its first prompt that sessions with the same tools share in production."""
    num_agents: int
    turns: tuple[Turn, ...]


@dataclass(slots=True, kw_only=True)
class RecordedRequest:
    """A request as a file describes it."""

    at_s: float
    """Time since its session began, or any other moment."""
    end_s: float
    """End of its answer."""
    num_prompt_tokens: int
    num_output_tokens: int
    calls_tool: bool = False
    """Whether its answer ends with calls of tools, as far as the file says."""
    agent: str = ""
    """Empty: the main agent."""
    kept: Beginning
    """Leading tokens of an earlier prompt."""
    after: tuple[int, ...] | None = None
    """Requests that it waits for; None: by the rule above."""
    pause_s: float | None = None
    """Time after the request before of its agent; None: as the times say."""


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class PrefixTree:
    """Finds, for each of several lists of ids, the latest one before it that begins most alike."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}
        self._last_of = [0]
        self._num_added = 0

    def add(self, ids: Iterable[Hashable]) -> tuple[int, int]:
        """Add a list; return the number of the earlier list, and how many leading ids they have in common."""
        node, depth, found = 0, 0, 0
        for each in ids:
            child = self._nodes.get((node, each))
            if child is None:
                child = self._nodes[node, each] = len(self._last_of)
                self._last_of.append(self._num_added)
            elif self._last_of[child] < self._num_added:
                depth, found = depth + 1, self._last_of[child]
                self._last_of[child] = self._num_added
            node = child
        self._num_added += 1
        return found, depth


def session_of(
    name: str, requests: Sequence[RecordedRequest], *, tools: int | None, system: int | None
) -> RecordedSession:
    """Return a session of requests, at least one, each after those that it waits for and begins with."""
    turns: list[Turn] = []
    ancestors: list[int] = []  # as bits
    for index, request in enumerate(requests):
        after = _after(requests, index) if request.after is None else request.after
        known = 0
        for turn in after:
            known |= ancestors[turn] | 1 << turn
        ancestors.append(known)
        beginning, copied = _beginning(requests, turns, index, known)
        num_new = request.num_prompt_tokens - beginning.num_tokens - sum(each.num_tokens for each in copied)
        turns.append(
            Turn(
                segments=(*copied, Segment(index, num_new)),
                num_output_tokens=request.num_output_tokens,
                calls_tool=request.calls_tool,
                think_s=_pause_s(requests, index, after),
                beginning=beginning,
                after=after,
            )
        )
    return RecordedSession(
        name=name,
        num_tool_tokens=tools or 0,
        num_system_tokens=system or 0,
        num_agents=len({request.agent for request in requests}),
        turns=tuple(turns),
    )


def _after(requests: Sequence[RecordedRequest], index: int) -> tuple[int, ...]:
    """Return the requests that one waits for, by the rule above."""
    request, own = requests[index], requests[index].agent
    before = next((i for i in reversed(range(index)) if requests[i].agent == own), None)
    if before is None:
        parents = [i for i in range(index) if not requests[i].agent and requests[i].end_s <= request.at_s]
        return (max(parents, key=lambda i: requests[i].end_s),) if parents else () if index == 0 else (0,)
    if own:
        return (before,)
    last_of = {requests[i].agent: i for i in range(before + 1, index) if requests[i].agent}
    return (before, *(i for i in last_of.values() if requests[i].end_s <= request.at_s))


def _pause_s(requests: Sequence[RecordedRequest], index: int, after: tuple[int, ...]) -> float:
    request = requests[index]
    if request.pause_s is not None and len(after) == 1 and requests[after[0]].agent == request.agent:
        return request.pause_s
    return max(0.0, request.at_s - max((requests[turn].end_s for turn in after), default=requests[0].at_s))


def _beginning(
    requests: Sequence[RecordedRequest], turns: Sequence[Turn], index: int, ancestors: int
) -> tuple[Beginning, tuple[Segment, ...]]:
    """Return a prompt's beginning, and the segments after it that it has in common with a turn beside it."""
    request, kept = requests[index], requests[index].kept
    most = request.num_prompt_tokens - 1  # a prompt has something of its own
    if not kept.num_tokens:
        return Beginning(0, 0), ()
    source = requests[kept.turn]
    num_tokens = kept.num_tokens
    if num_tokens > source.num_prompt_tokens - BLOCK_SIZE:  # all of its full blocks
        whole = source.num_prompt_tokens + source.num_output_tokens
        num_tokens = whole if whole <= most else source.num_prompt_tokens
    kept, copied = Beginning(kept.turn, min(num_tokens, most)), tuple[Segment, ...]()
    while kept.num_tokens and not ancestors >> kept.turn & 1:
        beside = turns[kept.turn]
        assert beside.beginning is not None, "it was read here"
        copied = (*_cut(beside.segments, kept.num_tokens - beside.beginning.num_tokens), *copied)
        kept = Beginning(beside.beginning.turn, min(kept.num_tokens, beside.beginning.num_tokens))
    return kept, copied


def _cut(segments: Sequence[Segment], num_tokens: int) -> tuple[Segment, ...]:
    found = []
    for segment in segments:
        if num_tokens > 0:
            found.append(cut_segment(segment, min(num_tokens, segment.num_tokens)))
            num_tokens -= segment.num_tokens
    return tuple(found)
