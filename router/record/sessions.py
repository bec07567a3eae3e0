"""Sessions: the turns of one conversation, agent or task, as a router recognizes them.

A request continues a turn if its prompt begins with the whole prompt of that turn: then that turn's chain of blocks has
returned. A session has a name of the client's (`prompt_cache_key`, `X-Session-Id`, Anthropic's `metadata.user_id`), or
is the turns that continue one another. Sub-agents are chains of their own, also under their parent's name.

Names and chains are looked up within one tenant alone. They are no authentication: a wrong name makes a forecast worse,
and nothing else. All tables are bounded, each tenant's by itself; what leaves them counts as not having come back.
"""

import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from common.block_hash import BlockHashes
from common.clock import Clock
from common.ids import BlockHash
from common.return_curve import ReturnCurve
from router.record.returns import ReturnTimes, TurnKind, pace_of

MAX_SESSION_CHARS = 256
MAX_TENANTS = 512
"""Tenants whose sessions are known, the latest ones."""
MAX_TURNS = 4096
"""Turns of one tenant that may still come back, the latest ones; and as many names of sessions."""
MAX_TURNS_OF_ALL = 32 * MAX_TURNS
"""Turns of all tenants, of which each has an equal share at most, used or not."""
MAX_WAIT_S = 4 * 3600.0
"""Age at which a turn counts as one that does not come back."""
_MAX_NEW_BLOCKS = 2048
"""Last blocks of a prompt before which a turn that it continues may end; a turn rarely adds more."""
_MAX_GIVEN_UP = 16
"""Turns that one call gives up, at 15 µs each; the next ones wait for the next call."""
_PACE_WEIGHT = 0.3
_KEY_BYTES = 16


@dataclass(slots=True, eq=False)
class Session:
    """What is known of a session."""

    mean_log_s: float | None = None
    """Mean binary logarithm of the seconds after which it came back, later ones counting more; None: it has not."""

    def note_return(self, age_s: float) -> None:
        """Count a return."""
        log_s = math.log2(max(age_s, 1.0))
        mean = log_s if self.mean_log_s is None else self.mean_log_s
        self.mean_log_s = mean + _PACE_WEIGHT * (log_s - mean)


@dataclass(slots=True)
class _Turn:
    session: Session
    kind: TurnKind
    ended_s: float
    num_blocks: int


@dataclass(slots=True)
class _Tenant:
    named: OrderedDict[bytes, Session] = field(default_factory=OrderedDict)
    """By a hash of the name."""
    turns: OrderedDict[BlockHash, _Turn] = field(default_factory=OrderedDict)
    """Turns that may come back, by the last full block of their prompt, in the order of their ends."""
    times: ReturnTimes = field(default_factory=ReturnTimes)


class Sessions:
    """The sessions of all tenants. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    @property
    def num_tenants(self) -> int:
        """Tenants whose sessions are known."""
        return len(self._tenants)

    def num_turns(self, tenant: str) -> int:
        """Return the turns of a tenant that may still come back."""
        return len(self._tenants[tenant].turns) if tenant in self._tenants else 0

    def begin(self, tenant: str, prompt: BlockHashes, *, name: str = "") -> Session:
        """Return the session of a request that begins; the turn that it continues, if any, has come back."""
        of_tenant, now_s = self._of(tenant), self._clock.monotonic()
        self._give_up(of_tenant)
        session: Session | None = None
        if of_tenant.turns:
            ends = prompt[max(0, len(prompt) - _MAX_NEW_BLOCKS) :].digests()
            found = next((each for each in reversed(ends) if each in of_tenant.turns), None)
            if found is not None:
                turn = of_tenant.turns.pop(found)
                session, age_s = turn.session, max(0.0, now_s - turn.ended_s)
                of_tenant.times.note(turn.kind, age_s, turn.num_blocks, has_returned=True)
                session.note_return(age_s)
        if name:
            key = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()
            session = of_tenant.named.pop(key, None) or session or Session()
            of_tenant.named[key] = session
            while len(of_tenant.named) > self._max_turns:
                of_tenant.named.popitem(last=False)
        return session or Session()

    def end(self, tenant: str, session: Session, prompt: BlockHashes, *, calls_tool: bool) -> ReturnCurve | None:
        """Note the end of a turn; returns how long to keep its blocks, or None: as any others."""
        if not prompt:
            return None
        of_tenant = self._of(tenant)
        kind = TurnKind(calls_tool=calls_tool, pace=pace_of(session.mean_log_s))
        if (before := of_tenant.turns.pop(prompt[-1], None)) is not None:  # the same prompt, side by side
            self._give_up_turn(of_tenant, before)
        of_tenant.turns[prompt[-1]] = _Turn(session, kind, self._clock.monotonic(), len(prompt))
        self._give_up(of_tenant)
        return of_tenant.times.curve(kind)

    def _of(self, tenant: str) -> _Tenant:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant()
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return found

    @property
    def _max_turns(self) -> int:
        return min(MAX_TURNS, MAX_TURNS_OF_ALL // len(self._tenants))

    def _give_up(self, of_tenant: _Tenant) -> None:
        """Count some of the turns that are too old or too many as not coming back."""
        before_s = self._clock.monotonic() - MAX_WAIT_S
        for _ in range(_MAX_GIVEN_UP):
            turn = next(iter(of_tenant.turns.values()), None)
            if turn is None or (turn.ended_s >= before_s and len(of_tenant.turns) <= self._max_turns):
                return
            of_tenant.turns.popitem(last=False)
            self._give_up_turn(of_tenant, turn)

    def _give_up_turn(self, of_tenant: _Tenant, turn: _Turn) -> None:
        age_s = self._clock.monotonic() - turn.ended_s
        of_tenant.times.note(turn.kind, age_s, turn.num_blocks, has_returned=False)
