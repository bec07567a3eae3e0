"""Generates traces of synthetic traffic: chats, agents and single prompts.

Lengths, rates and bursts follow the published Mooncake conversation trace: prompts are log-normal with a median of
7k and a 99th percentile near 80k tokens, answers have a median near 350, arrivals come in batches every three seconds,
and in an hour about 37 % of all blocks were seen before, by the 37 % of requests that find more than the first block,
which all share. Short traces find less: they do not contain earlier requests.

A *session* begins with the common block, or with a system prompt shared with some others (Zipf popularity), and has
several turns; the prompt of each is the history with an addition. Sessions already run when the trace begins.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from measure.workload.traces import MOONCAKE_BLOCK_SIZE, Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A heavy-tailed length or time."""

    median: float
    sigma: float

    def draw(self, random: Random) -> float:
        """Return a value."""
        return random.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKind:
    """Behaviour of one kind of client. Lengths in tokens."""

    name: str
    weight: float
    mean_turns: float
    """Mean of a geometric distribution."""
    system_share: float
    """Share of sessions with a system prompt beyond the common beginning of all prompts."""
    first_tokens: LogNormal
    """Addition of the first turn to the system prompt: a question, documents, a repository."""
    turn_tokens: LogNormal
    """Addition of later turns to the answer: the next question, output of a tool."""
    output_tokens: LogNormal
    gap_s: LogNormal
    """Time from a request to the next one of the session: the answer, and thinking or a tool."""


CHAT = SessionKind(
    name="chat",
    weight=0.23,
    mean_turns=2.8,
    system_share=0.15,
    first_tokens=LogNormal(median=4_200, sigma=1.25),
    turn_tokens=LogNormal(median=300, sigma=1.3),
    output_tokens=LogNormal(median=370, sigma=0.45),
    gap_s=LogNormal(median=70, sigma=1.3),
)
AGENT = SessionKind(
    name="agent",
    weight=0.02,
    mean_turns=8,
    system_share=1.0,
    first_tokens=LogNormal(median=3_000, sigma=0.9),
    turn_tokens=LogNormal(median=900, sigma=1.1),
    output_tokens=LogNormal(median=220, sigma=0.8),
    gap_s=LogNormal(median=12, sigma=0.7),
)
SINGLE = SessionKind(
    name="single",
    weight=0.75,
    mean_turns=1,
    system_share=0.03,
    first_tokens=LogNormal(median=5_700, sigma=1.2),
    turn_tokens=LogNormal(median=1, sigma=0),
    output_tokens=LogNormal(median=340, sigma=0.5),
    gap_s=LogNormal(median=1, sigma=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthSettings:
    """Settings of a trace."""

    num_requests: int
    seed: int = 0
    requests_per_s: float = 3.4
    burst_period_s: float = 3.0
    """Arrivals are batched at multiples of it; 0: no batches."""
    kinds: tuple[SessionKind, ...] = (CHAT, AGENT, SINGLE)
    num_system_prompts: int = 12
    system_zipf: float = 1.1
    """Exponent of popularity: the k-th system prompt has weight k**-system_zipf."""
    system_tokens: LogNormal = LogNormal(median=1_100, sigma=0.6)
    num_common_tokens: int = MOONCAKE_BLOCK_SIZE
    """Length of the common beginning of all prompts: a template and the name of an assistant."""
    max_prompt_tokens: int = 126_000
    """Length of a prompt at which its session ends."""
    max_output_tokens: int = 2_000
    warm_up_s: float = 900.0
    """Time before the trace in which sessions may have begun."""


def synthesize(settings: SynthSettings) -> Trace:
    """Return a trace; equal settings give equal traces."""
    random = Random(settings.seed)
    sessions = _Sessions(settings, random)
    duration_s = settings.num_requests / settings.requests_per_s
    requests: list[TraceRequest] = []
    while len(requests) < settings.num_requests:
        start_s = random.uniform(-settings.warm_up_s, duration_s)
        requests += [request for request in sessions.draw(start_s) if 0 <= request.arrival_s < duration_s]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(
        name=f"synth-{settings.seed}",
        block_size=MOONCAKE_BLOCK_SIZE,
        requests=tuple(requests[: settings.num_requests]),
    )


class _Text:
    """A growing text; `full` has the ids of its full blocks, which never change."""

    def __init__(self, ids: Iterator[int], *, of: "_Text | None" = None) -> None:
        self._ids = ids
        self.full: list[int] = [] if of is None else list(of.full)
        self.num_tokens: int = 0 if of is None else of.num_tokens

    def grow(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        while len(self.full) < self.num_tokens // MOONCAKE_BLOCK_SIZE:
            self.full.append(next(self._ids))

    def block_ids(self) -> tuple[int, ...]:
        """Return the block ids; a partial last block has a new id in each call."""
        tail = (next(self._ids),) if self.num_tokens % MOONCAKE_BLOCK_SIZE else ()
        return (*self.full, *tail)


class _Sessions:
    def __init__(self, settings: SynthSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        self._ids = itertools.count()
        self._common = _Text(self._ids)
        self._common.grow(settings.num_common_tokens)
        self._prompts = [_Text(self._ids, of=self._common) for _ in range(settings.num_system_prompts)]
        self._popularity = [(rank + 1) ** -settings.system_zipf for rank in range(settings.num_system_prompts)]
        for prompt in self._prompts:
            prompt.grow(round(settings.system_tokens.draw(random)))

    def draw(self, start_s: float) -> Iterator[TraceRequest]:
        """Yield the requests of a new session."""
        settings, random = self._settings, self._random
        (kind,) = random.choices(settings.kinds, [kind.weight for kind in settings.kinds])
        text = self._beginning(kind)
        text.grow(max(1, round(kind.first_tokens.draw(random))))
        now_s = start_s
        while text.num_tokens <= settings.max_prompt_tokens:
            num_output_tokens = min(max(1, round(kind.output_tokens.draw(random))), settings.max_output_tokens)
            yield TraceRequest(
                arrival_s=_batched(now_s, settings.burst_period_s),
                num_prompt_tokens=text.num_tokens,
                num_output_tokens=num_output_tokens,
                block_ids=text.block_ids(),
            )
            if random.random() * kind.mean_turns < 1:
                return
            text.grow(num_output_tokens + max(1, round(kind.turn_tokens.draw(random))))
            now_s += kind.gap_s.draw(random)

    def _beginning(self, kind: SessionKind) -> _Text:
        if self._random.random() >= kind.system_share:
            return _Text(self._ids, of=self._common)
        (prompt,) = self._random.choices(self._prompts, self._popularity)
        return _Text(self._ids, of=prompt)


def _batched(time_s: float, period_s: float) -> float:
    return math.floor(time_s / period_s) * period_s if period_s else time_s
