"""Accounts of tenants: current use, whether the limits allow more, and which tenant gives way in a full line."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import RefusalCause, Refused
from router.placement.limits import UNKNOWN_RETRY_S, Pace, TokenBucket, retry_after
from router.tenants import Tenant

if TYPE_CHECKING:
    from router.record.ticket import Ticket

MAX_INQUIRIES = 256
"""Concurrent calls of one tenant that only tokenize."""
PAID_AT_ONCE_S = 0.001
"""Time of the router that is charged in one go: each charge costs some microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Tokens that a request got, or is expected to get."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    num_output_tokens: int = 0
    num_samples: int = 1
    num_pinned_tokens: int = 0
    """Leading tokens that marks have pinned."""
    num_refused_pin_tokens: int = 0
    """Tokens that marks could not pin."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count against a token rate."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Account:
    """Account of one tenant. Event loop only."""

    tenant: Tenant
    requests: TokenBucket | None
    tokens: TokenBucket | None
    pace: Pace = field(default_factory=Pace)
    waiting: "dict[int, Ticket]" = field(default_factory=dict)
    """Requests without a plan, by number, in order of arrival."""
    num_returned: int = 0
    """Requests that wait again because a worker has refused their plan."""
    num_active: int = 0
    """Requests that have had a plan and have not ended."""
    num_inquiries: int = 0
    """Running calls that only tokenize."""
    router_s: float = 0.0
    """Time that its requests have taken of the event loop, and of the threads and processes that read them."""
    compile_s: float = 0.0
    """Time that workers have taken to compile what its answers have to follow."""
    num_prompt_tokens: int = 0
    """Prompt tokens that were computed for it."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_refused_pin_tokens: int = 0
    """Tokens of its marked prefixes that could not be pinned."""
    num_set_back: int = 0
    """Answers that gave their room on a decode worker to another tenant's request and went on later."""
    on_cost: "Callable[[Account, float], None]" = lambda _account, _seconds: None
    """Called with time that is to be charged to its share."""
    unpaid_s: float = 0.0
    """Time of the router that is not charged yet."""

    @property
    def num_queued(self) -> int:
        """Requests without a plan. Any thread."""
        return len(self.waiting) + self.num_returned

    @property
    def is_full(self) -> bool:
        """Whether the tenant has all the requests with a plan that it may have."""
        return self.tenant.max_concurrent is not None and self.num_active >= self.tenant.max_concurrent

    def take_request(self, now_s: float) -> Refused | None:
        """Count a request that arrives now, before its size is known; or return why not."""
        name, limit = self.tenant.name, self.tenant.max_queued
        if limit is not None and self.num_queued >= limit:
            reason = f"tenant {name}: {self.num_queued} requests are waiting; its limit is {limit}"
            return Refused(
                reason=reason, retry_after_s=self.pace.promise_s(now_s), cause=RefusalCause.TENANT_QUEUE_FULL
            )
        return self._take_rate(now_s)

    def check_rate(self, now_s: float) -> Refused | None:
        """Return why a request may not even be read now; None if it may."""
        name = self.tenant.name
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            reason = f"tenant {name}: more than {self.tenant.requests_per_min:g} requests per minute"
            return Refused(reason=reason, retry_after_s=retry_after(wait_s), cause=RefusalCause.REQUEST_RATE)
        return self._check_tokens(1, now_s)

    def take_inquiry(self, now_s: float) -> Refused | None:
        """Count a call that only tokenizes against the request rate; or return why not."""
        if self.num_inquiries >= MAX_INQUIRIES:
            reason = f"tenant {self.tenant.name}: {self.num_inquiries} calls tokenize; the limit is {MAX_INQUIRIES}"
            return Refused(reason=reason, retry_after_s=UNKNOWN_RETRY_S, cause=RefusalCause.TENANT_QUEUE_FULL)
        return self._take_rate(now_s)

    def _take_rate(self, now_s: float) -> Refused | None:
        if (refused := self.check_rate(now_s)) is None:
            self.note_request(now_s)
        return refused

    def pay(self, seconds: float) -> None:
        """Charge time of the router to the tenant (common/metering.py), some steps at once."""
        self.router_s += seconds
        self.unpaid_s += seconds
        if self.unpaid_s >= PAID_AT_ONCE_S:
            unpaid_s, self.unpaid_s = self.unpaid_s, 0.0
            self.on_cost(self, unpaid_s)

    def note_service(self, service: Service) -> None:
        """Count the tokens that a request got."""
        self.num_prompt_tokens += service.num_prompt_tokens - service.num_cached_tokens
        self.num_cached_tokens += service.num_cached_tokens
        self.num_output_tokens += service.num_output_tokens
        self.num_refused_pin_tokens += service.num_refused_pin_tokens

    def note_request(self, now_s: float) -> None:
        """Count a request against the rate."""
        if self.requests is not None:
            self.requests.take(1, now_s)

    def take_tokens(self, num_tokens: int, now_s: float) -> Refused | None:
        """Count the expected tokens of a request; or take the request back and return why not."""
        refused = self._check_tokens(num_tokens, now_s)
        if refused is None:
            self.correct_tokens(num_tokens, now_s)
        else:
            self.give_back_request(now_s)
        return refused

    def give_back_request(self, now_s: float) -> None:
        """Count a request that was taken as if it had never arrived."""
        if self.requests is not None:
            self.requests.take(-1, now_s)

    def correct_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens used beyond the expectation; a negative number gives tokens back."""
        if self.tokens is not None:
            self.tokens.take(num_tokens, now_s)

    def _check_tokens(self, num_tokens: int, now_s: float) -> Refused | None:
        if self.tokens is None or not (wait_s := self.tokens.wait_s(num_tokens, now_s)):
            return None
        reason = f"tenant {self.tenant.name}: more than {self.tenant.tokens_per_min:g} tokens per minute"
        return Refused(reason=reason, retry_after_s=retry_after(wait_s), cause=RefusalCause.TOKEN_RATE)


def open_account(
    tenant: Tenant, *, now_s: float, on_cost: Callable[[Account, float], None] = lambda _account, _seconds: None
) -> Account:
    """Return an account without requests and with full buckets."""

    def bucket(per_min: float | None) -> TokenBucket | None:
        return None if per_min is None else TokenBucket(per_min=per_min, now_s=now_s)

    requests, tokens = bucket(tenant.requests_per_min), bucket(tenant.tokens_per_min)
    return Account(tenant=tenant, requests=requests, tokens=tokens, on_cost=on_cost)


def account_above(newcomer: Account, accounts: Iterable[Account]) -> Account | None:
    """Return the account whose newest waiting request gives way to one more of the newcomer; None: refuse that one.

    While the line has room, any request may wait in it: tenants borrow what others leave free, one tenant alone all of
    it. In a full line, the *load* of a tenant is the number of its waiting requests divided by its weight. If the
    newcomer's tenant would, with it, have a lower load than the tenant with the highest, the newcomer takes the place
    of that tenant's newest request, which is refused; otherwise the newcomer is refused. (Longest queue drop, as in the
    buffers of switches, by weight.) With `max_queued` places and W the sum of the weights of all tenants, absent ones
    included:

    1. No tenant is refused within its reservation, max_queued · weight / W, while another is above its own. If every
       other load were at most the newcomer's, which is at most max_queued / W, the line would have a place left.
    2. No tenant loses a request within its reservation: the highest load of a full line is above max_queued / W.
    3. Two tenants never displace each other in turn: a displaced request would come back with the higher load.

    Reservations need no list of tenants, and the reservation of an absent tenant costs the others nothing.
    """
    highest = max((account for account in accounts if account.waiting), key=_load, default=None)
    if highest is None or _load(highest) <= (newcomer.num_queued + 1) / newcomer.tenant.weight:
        return None
    return highest


def _load(account: Account) -> float:
    return account.num_queued / account.tenant.weight
