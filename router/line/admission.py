"""Admission: which requests are taken in, and what each tenant has waiting, with a plan, and charged to it.

A request gets a *ticket*, or a refusal because the line or its tenant's share is full or a rate is used up. This is
cheap and happens before anything is tokenized; `take_tokens` follows when the size is known. In a full line a newcomer
may displace a request of a tenant that has more than its share (`account_above`).

A ticket's life, and its number in the account of its tenant:

    admit ─▶ waiting ─ give_plan ─▶ active ─ close ─▶ gone
                │                    │  ▲
           displace, close    take_back  give_plan
                │                    ▼  │
                └──▶ gone ◀─ close ─ returned

What a request really gets corrects what its tenant was charged for the plan: `correct_cached` when its prompt begins,
`settle` when it ends.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from common.clock import Clock
from common.errors import RefusalCause, Refused, RequestError
from common.metering import charge_to
from common.wire import message_of
from kvrelay.v1 import inference_pb2
from router.fleet.fleet import Fleet
from router.line.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, FairQueue
from router.line.turns import Turns
from router.line.wait import Wait
from router.observe.metrics import TenantMetrics
from router.placement.answer_pool import AnswerPool
from router.placement.limits import Pace
from router.placement.waits import PoolWaits
from router.record.account import Account, Service, account_above, open_account
from router.record.budget import Budget, Holding
from router.record.ticket import Ticket
from router.tenants import ANYBODY, NO_TERMS, Overload, Tenant, Terms

MIN_QUEUED = 512
"""Places in the line of a small fleet, unless configured."""
MAX_ARRIVING = 1024
"""Most requests of one tenant that may have begun to arrive."""
MAX_ARRIVING_BYTES = 32 << 20
"""Bytes of a tenant's requests that have begun to arrive and have not been read; of all tenants four times as many."""
MAX_UNSENT_ENTRIES = 4 << 20
"""The same for tokens and log-probabilities that wait for clients, or for the end of answers that are sent whole."""
MAX_UNREAD_BYTES = 256 << 20
"""The same for whole answers, from when they are written until their clients have read them; the largest has 100 MB."""
SECOND_COST = 10_000.0
"""Cost in the fair queue of a second of the router, or of compiling: that of so many prompt tokens."""
QUEUED_PER_WORKER = 4
"""Places in the line of a large one, for each worker: many requests wait for the worker that computes their prefix."""


class Admission:
    """Tickets and the accounts of tenants. Event loop only."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        queues: Mapping[AnswerPool, FairQueue[Wait]],
        clock: Clock,
        max_queued: int | None,
        metrics: TenantMetrics,
    ) -> None:
        """`queues` are the line's: tenants are charged there, and held back while they have all that they may have."""
        self._fleet = fleet
        self._queues = queues.values()
        self._clock = clock
        self._max_queued = max_queued
        self._metrics = metrics
        self._next_number = 0
        self.num_without_plan = 0
        """Tickets that wait for a first plan."""
        self.num_refused = 0
        """Requests refused before any worker was asked for anything."""
        self.waits = {pool: PoolWaits(clock, pool) for pool in AnswerPool}
        """Waits in line, by the pool that answers."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when a tenant may have another request with a plan."""
        self._accounts: dict[str, Account] = {}
        self._pace = Pace()
        self._turns = Turns()
        self.unsent = Budget(
            "tokens and log-probabilities of answers that are not sent yet",
            most=MAX_UNSENT_ENTRIES,
            most_in_all=4 * MAX_UNSENT_ENTRIES,
        )
        self.arrivals = Budget("bytes of unread requests", most=MAX_ARRIVING_BYTES, most_in_all=4 * MAX_ARRIVING_BYTES)
        self.unread = Budget("bytes of unread answers", most=MAX_UNREAD_BYTES, most_in_all=4 * MAX_UNREAD_BYTES)
        self._num_arriving: Counter[str] = Counter()
        metrics.watch(lambda: self.accounts)

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Accounts of all tenants seen so far. Any thread."""
        return tuple(self._accounts.values())

    @property
    def max_queued(self) -> int:
        """Most requests that wait for a first plan."""
        if self._max_queued is not None:
            return self._max_queued
        return max(MIN_QUEUED, QUEUED_PER_WORKER * len(self._fleet.members_by_id))

    @property
    def num_active(self) -> int:
        """Requests that have had a plan and have not ended."""
        return sum(account.num_active for account in self.accounts)

    @property
    def refusals(self) -> tuple[inference_pb2.TenantRefusals, ...]:
        """Refused requests by tenant and cause."""
        return tuple(
            inference_pb2.TenantRefusals(tenant=tenant, cause=cause, num_refused=count)
            for tenant, cause, count in self._metrics.refusals
        )

    @property
    def tenants(self) -> tuple[inference_pb2.TenantUsage, ...]:
        """Use by each tenant."""
        return tuple(
            message_of(
                inference_pb2.TenantUsage,
                account,
                tenant=account.tenant.name,
                weight=account.tenant.weight,
                num_pinned_tokens=0,  # workers tell
                num_arriving_bytes=self.arrivals.held_by(account.tenant.name),
                num_unsent_entries=self.unsent.held_by(account.tenant.name),
            )
            for account in self.accounts
        )

    def admit(self, tenant: Tenant = ANYBODY, terms: Terms = NO_TERMS) -> Ticket | Refused:
        """Return a ticket, or why there is none."""
        now_s = self._clock.monotonic()
        account, above = self._account(tenant, now_s), None
        if self.num_without_plan >= self.max_queued:
            above = account_above(account, self._accounts.values())
            if above is None:
                return self.refuse(tenant.name, self._full(now_s))
        if (no := account.take_request(now_s)) is not None:
            return self.refuse(tenant.name, no)
        if above is not None:
            self._displace(above, now_s)
        ticket = Ticket(number=self._next_number, account=account, terms=terms, received_s=now_s, on_close=self._close)
        self._next_number += 1
        if not self.num_without_plan:
            self._pace.begin(now_s)
        if not account.num_queued:
            account.pace.begin(now_s)
        self.num_without_plan += 1
        account.waiting[ticket.number] = ticket
        return ticket

    def _full(self, now_s: float) -> Refused:
        reason = f"{self.num_without_plan} requests are waiting; the limit is {self.max_queued}"
        return Refused(reason=reason, retry_after_s=self._pace.promise_s(now_s), cause=RefusalCause.QUEUE_FULL)

    def _displace(self, account: Account, now_s: float) -> None:
        """Refuse the account's newest request without a plan, whatever it is doing."""
        refused = self.refuse(account.tenant.name, self._full(now_s))
        _number, ticket = account.waiting.popitem()
        self.num_without_plan -= 1
        account.give_back_request(now_s)
        ticket.displace(refused)

    async def enter(self, tenant: Tenant) -> None:
        """Return when a request of the tenant may be read, and charge the running task to the tenant.

        Raises Overloaded when its rate is used up, or too many of its requests wait to be read.
        """
        account = self._account(tenant, self._clock.monotonic())
        charge_to(account)
        refused = account.check_rate(self._clock.monotonic()) or await self._turns.take(tenant)
        if refused is not None:
            raise self.refuse(tenant.name, refused).error()

    async def wait_turn(self, tenant: Tenant) -> None:
        """Return when a running request of the tenant may take some milliseconds of the event loop."""
        await self._turns.take(tenant, is_running=True)

    @contextmanager
    def arriving(self, tenant: Tenant) -> Iterator[Holding]:
        """Hold the bytes of a request that arrives and is read, inside the block.

        A request that cannot be read counts against the rate of its tenant like one that can. Raises Overloaded when
        too many of the tenant's have begun to arrive.
        """
        if self._num_arriving[tenant.name] >= MAX_ARRIVING:
            reason = f"tenant {tenant.name}: {MAX_ARRIVING} requests have begun to arrive"
            refused = Refused(reason=reason, retry_after_s=1.0, cause=RefusalCause.TENANT_QUEUE_FULL)
            raise self.refuse(tenant.name, refused).error()
        self._num_arriving[tenant.name] += 1
        try:
            with self.arrivals.holding(tenant) as holding:
                yield holding
        except RequestError:
            now_s = self._clock.monotonic()
            self._account(tenant, now_s).note_request(now_s)
            raise
        finally:
            self._num_arriving[tenant.name] -= 1

    def charge_time(self, account: Account, seconds: float) -> None:
        """Charge time of the router that a tenant's requests have taken, whatever becomes of them, to its share."""
        self._turns.charge(account.tenant, seconds)
        self._charge_seconds(account, seconds)

    def charge_compiling(self, ticket: Ticket, seconds: float) -> None:
        """Charge time that workers have compiled for a request to the share of its tenant."""
        ticket.account.compile_s += seconds
        self._charge_seconds(ticket.account, seconds)

    def charge_reading(self, account: Account, seconds: float) -> None:
        """Charge time that a worker has read blocks for a request that left to the share of its tenant."""
        self._charge_seconds(account, seconds)

    def _charge_seconds(self, account: Account, seconds: float) -> None:
        for queue in self._queues:
            queue.charge(account.tenant.name, SECOND_COST * seconds)

    @contextmanager
    def inquiry(self, tenant: Tenant) -> Iterator[None]:
        """Count a call that needs the tokenizer but no worker, for the duration of the block.

        Raises Overloaded when the tenant has too many such calls at once, or its rate is used up.
        """
        now_s = self._clock.monotonic()
        account = self._account(tenant, now_s)
        if (refused := account.take_inquiry(now_s)) is not None:
            self.refuse(tenant.name, refused)
            raise refused.error()
        account.num_inquiries += 1
        try:
            yield
        finally:
            account.num_inquiries -= 1

    def take_tokens(self, ticket: Ticket, expected: Service) -> Refused | None:
        """Count the tokens of a request against the rate of its tenant; or return why not."""
        account = ticket.account
        refused = account.take_tokens(expected.num_tokens, self._clock.monotonic())
        if refused is not None:
            return self.refuse(account.tenant.name, refused)
        ticket.expected = expected
        return None

    def correct_cached(self, ticket: Ticket, num_cached_tokens: int) -> None:
        """Replace the predicted cached tokens of a request by those that its worker found."""
        self._charge(ticket, replace(ticket.service, num_cached_tokens=num_cached_tokens))

    def settle(self, ticket: Ticket, actual: Service) -> None:
        """Replace the expected service of a request by the actual one. Call once, before its ticket is closed."""
        account = ticket.account
        account.correct_tokens(actual.num_tokens - ticket.expected.num_tokens, self._clock.monotonic())
        ticket.expected = actual
        self._charge(ticket, actual)
        account.note_service(actual)
        self._metrics.count_service(account.tenant.name, actual)

    def refuse(self, tenant: str, refused: Refused) -> Refused:
        """Count a refusal and return it."""
        self._metrics.count_refusal(tenant, refused.cause)
        self.num_refused += 1
        return refused

    def note_set_back(self, tenant: str) -> None:
        """Count an answer of a tenant whose room goes to another one."""
        self._accounts[tenant].num_set_back += 1
        self._metrics.count_set_back(tenant)

    def promise_s(self) -> float:
        """Return the time after which a refused request may find a place, by the pace at which others left the line."""
        return self._pace.promise_s(self._clock.monotonic())

    def give_plan(self, ticket: Ticket, expected: Service) -> None:
        """Count a booked plan for a ticket, and charge `expected` for it, unless it has had one."""
        if ticket.has_plan:
            return
        account, now_s = ticket.account, self._clock.monotonic()
        ticket.has_plan = True
        self.num_without_plan -= 1
        if ticket.is_returned:
            account.num_returned -= 1
        else:
            del account.waiting[ticket.number]
            self._pace.depart(now_s)
            account.pace.depart(now_s)
            self._metrics.observe_queue(account.tenant.name, now_s - ticket.received_s)
        account.num_active += 1
        self._charge(ticket, expected)
        if account.is_full:
            for queue in self._queues:
                queue.hold(account.tenant.name)
            for waits in self.waits.values():
                waits.hold(account.tenant.name)

    def take_back(self, ticket: Ticket) -> None:
        """Let a newcomer that a worker has refused wait as before its plan; no other request displaces it any more."""
        ticket.has_plan, ticket.is_returned = False, True
        ticket.account.num_active -= 1
        ticket.account.num_returned += 1
        self.num_without_plan += 1
        self._release(ticket.account)

    def _close(self, ticket: Ticket) -> None:
        if ticket.is_closed:
            return
        ticket.is_closed = True
        account = ticket.account
        if not ticket.has_plan:
            if ticket.is_returned:
                account.num_returned -= 1
                self.num_without_plan -= 1
            elif account.waiting.pop(ticket.number, None) is not None:
                self.num_without_plan -= 1
            return
        account.num_active -= 1
        if self._release(account):
            self.on_room()

    def _release(self, account: Account) -> bool:
        """Let the tenant's requests have plans; returns whether it may have another one."""
        if account.is_full:
            return False
        for queue in self._queues:
            queue.release(account.tenant.name)
        for waits in self.waits.values():
            waits.release(account.tenant.name)
        return True

    def _charge(self, ticket: Ticket, service: Service) -> None:
        """Make `service` the whole charge of a request."""
        cost = cost_of(service) - cost_of(ticket.service)
        for queue in self._queues:
            queue.charge(ticket.account.tenant.name, cost)
        ticket.service = service

    def _account(self, tenant: Tenant, now_s: float) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = open_account(tenant, now_s=now_s, on_cost=self.charge_time)
            yields = tenant.overload is Overload.YIELD
            for queue in self._queues:
                queue.add_tenant(tenant.name, weight=tenant.weight, yields=yields)
        return account


def cost_of(service: Service) -> float:
    """Return what a service costs in the fair queue."""
    computed = service.num_prompt_tokens - service.num_cached_tokens
    return PROMPT_TOKEN_COST * computed + OUTPUT_TOKEN_COST * service.num_output_tokens
