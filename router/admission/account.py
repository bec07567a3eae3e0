"""What one tenant uses just now, and what its limits say to more."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import RefusalCause, Refused
from router.admission.limits import UNKNOWN_RETRY_S, Pace, TokenBucket, retry_after
from router.tenants import Tenant

if TYPE_CHECKING:
    from router.admission.ticket import Ticket

GUESSED_OUTPUT_TOKENS = 256.0
"""Length of an answer as long as the tenant has had none."""
MAX_INQUIRIES = 256
"""Calls of one tenant that only tokenize, at once."""
_OUTPUT_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a request got, or is expected to get."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt: those that were not computed."""
    num_output_tokens: int = 0
    num_samples: int = 1

    @property
    def num_tokens(self) -> int:
        """What counts against a token rate."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Account:
    """One tenant's books. Event loop only."""

    tenant: Tenant
    requests: TokenBucket | None
    tokens: TokenBucket | None
    pace: Pace = field(default_factory=Pace)
    waiting: "dict[int, Ticket]" = field(default_factory=dict)
    """Requests without a plan so far, by number, in order of arrival."""
    num_active: int = 0
    """Requests that have had a plan and have not ended."""
    num_inquiries: int = 0
    """Calls that only tokenize, and have not ended."""
    mean_output_tokens: float = GUESSED_OUTPUT_TOKENS

    @property
    def num_queued(self) -> int:
        """Requests without a plan so far. Any thread."""
        return len(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether it has as many requests with a plan as it may."""
        return self.tenant.max_concurrent is not None and self.num_active >= self.tenant.max_concurrent

    def expected_output_tokens(self, *, at_most: int) -> int:
        """Return the likely length of one answer, in tokens."""
        return max(1, min(round(self.mean_output_tokens), at_most))

    def take_request(self, now_s: float) -> Refused | None:
        """Count a request that comes now, before anything is known of its size; or say why not."""
        name, limit = self.tenant.name, self.tenant.max_queued
        if limit is not None and self.num_queued >= limit:
            reason = f"tenant {name}: {self.num_queued} requests are waiting; its limit is {limit}"
            return Refused(
                reason=reason, retry_after_s=self.pace.promise_s(now_s), cause=RefusalCause.TENANT_QUEUE_FULL
            )
        return self._take_rate(now_s)

    def take_inquiry(self, now_s: float) -> Refused | None:
        """Count a call that only tokenizes, at the rate of requests; or say why not."""
        if self.num_inquiries >= MAX_INQUIRIES:
            reason = f"tenant {self.tenant.name}: {self.num_inquiries} calls tokenize; the limit is {MAX_INQUIRIES}"
            return Refused(reason=reason, retry_after_s=UNKNOWN_RETRY_S, cause=RefusalCause.TENANT_QUEUE_FULL)
        return self._take_rate(now_s)

    def _take_rate(self, now_s: float) -> Refused | None:
        name = self.tenant.name
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            reason = f"tenant {name}: more than {self.tenant.requests_per_min:g} requests per minute"
            return Refused(reason=reason, retry_after_s=retry_after(wait_s), cause=RefusalCause.REQUEST_RATE)
        if (refused := self._check_tokens(1, now_s)) is not None:
            return refused
        if self.requests is not None:
            self.requests.take(1, now_s)
        return None

    def take_tokens(self, num_tokens: int, now_s: float) -> Refused | None:
        """Count the tokens that a request is expected to take; or say why not, and count it as never having come."""
        refused = self._check_tokens(num_tokens, now_s)
        if refused is None:
            self.correct_tokens(num_tokens, now_s)
        else:
            self.give_back_request(now_s)
        return refused

    def give_back_request(self, now_s: float) -> None:
        """Count one that was taken as never having come."""
        if self.requests is not None:
            self.requests.take(-1, now_s)

    def correct_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that were used beyond the expectation; fewer than expected: a negative number."""
        if self.tokens is not None:
            self.tokens.take(num_tokens, now_s)

    def learn_output(self, service: Service) -> None:
        """Learn from a completed request how long answers are."""
        mean = service.num_output_tokens / service.num_samples
        self.mean_output_tokens += _OUTPUT_WEIGHT * (mean - self.mean_output_tokens)

    def _check_tokens(self, num_tokens: int, now_s: float) -> Refused | None:
        if self.tokens is None or not (wait_s := self.tokens.wait_s(num_tokens, now_s)):
            return None
        reason = f"tenant {self.tenant.name}: more than {self.tenant.tokens_per_min:g} tokens per minute"
        return Refused(reason=reason, retry_after_s=retry_after(wait_s), cause=RefusalCause.TOKEN_RATE)


def open_account(tenant: Tenant, *, now_s: float) -> Account:
    """Return empty books with full buckets."""

    def bucket(per_min: float | None) -> TokenBucket | None:
        return None if per_min is None else TokenBucket(per_min=per_min, now_s=now_s)

    return Account(tenant=tenant, requests=bucket(tenant.requests_per_min), tokens=bucket(tenant.tokens_per_min))
