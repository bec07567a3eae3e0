"""Memory that requests hold before their line bounds them: bodies that arrive, and answers that are gathered.

What one tenant holds is bounded, and what all hold together. Where all is taken, the tenant that holds most gives way:
its newest holding is revoked for one of a tenant that holds less, so none can keep another out.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from common.errors import RefusalCause, Refused
from router.placement.limits import UNKNOWN_RETRY_S
from router.tenants import Tenant


@dataclass(slots=True, eq=False)
class Holding:
    """Share of a budget that one request holds. Leaving its `with` block gives it back."""

    budget: "Budget"
    tenant: Tenant
    on_revoked: Callable[[Refused], None]
    """Called when it is lost to another tenant."""
    amount: int = 0
    is_over: bool = False
    """Whether it was given back or lost; it never grows again."""

    def grow(self, amount: int) -> Refused | None:
        """Take so much more; or return why not, and lose everything."""
        return self.budget.take(self, amount)

    def shrink(self, amount: int) -> None:
        """Give so much back. Harmless after everything was lost."""
        self.budget.take_back(self, min(amount, self.amount))

    def __enter__(self) -> "Holding":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self.budget.give_back(self)


class Budget:
    """A bounded amount, shared by all tenants. Event loop only."""

    def __init__(self, what: str, *, most: int, most_in_all: int) -> None:
        """`what` names it in refusals; `most` is the bound of one tenant."""
        assert most <= most_in_all, "a tenant cannot hold more than all"
        self._what = what
        self._most = most
        self._most_in_all = most_in_all
        self._held: defaultdict[str, int] = defaultdict(int)
        self._holdings: defaultdict[str, dict[Holding, None]] = defaultdict(dict)
        self.num_held = 0
        """Held by all tenants."""

    def held_by(self, tenant: str) -> int:
        """Return what a tenant holds."""
        return self._held.get(tenant, 0)

    def holding(self, tenant: Tenant, on_revoked: Callable[[Refused], None] = lambda _refused: None) -> Holding:
        """Return a holding of nothing yet."""
        return Holding(self, tenant, on_revoked)

    def take(self, holding: Holding, amount: int) -> Refused | None:
        """See `Holding.grow`."""
        name = holding.tenant.name
        if holding.is_over or self._held[name] + amount > self._most:
            self.give_back(holding)
            return self._refused(f"tenant {name} has {self._held.get(name, 0)} of at most {self._most}")
        giving_way = self._giving_way(name, amount)
        if giving_way is None:
            self.give_back(holding)
            return self._refused(f"all tenants have {self.num_held} of at most {self._most_in_all}")
        for each in giving_way:
            self.give_back(each)
            each.on_revoked(self._refused(f"another tenant needs them; {each.tenant.name} has most"))
        holding.amount += amount
        self.num_held += amount
        self._held[name] += amount
        self._holdings[name][holding] = None
        return None

    def _giving_way(self, name: str, amount: int) -> list[Holding] | None:
        """Return the holdings that are revoked so that a tenant can take so much; None where too few hold more."""
        found: list[Holding] = []
        held, lacking = dict(self._held), self.num_held + amount - self._most_in_all
        newest = {tenant: reversed(holdings) for tenant, holdings in self._holdings.items()}
        while lacking > 0:
            largest = max(held, key=lambda each: held[each])
            if held[largest] <= held[name] + amount:
                return None
            found.append(next(newest[largest]))
            held[largest] -= found[-1].amount
            lacking -= found[-1].amount
        return found

    def take_back(self, holding: Holding, amount: int) -> None:
        """See `Holding.shrink`. A holding of nothing is not one that could be revoked."""
        name = holding.tenant.name
        holding.amount -= amount
        self.num_held -= amount
        self._held[name] -= amount
        if not holding.amount:
            self._holdings[name].pop(holding, None)
        if not self._holdings[name]:
            del self._holdings[name], self._held[name]

    def give_back(self, holding: Holding) -> None:
        """Take back all that a holding has. Harmless when repeated."""
        holding.is_over = True
        self.take_back(holding, holding.amount)

    def _refused(self, reason: str) -> Refused:
        return Refused(
            reason=f"too many {self._what}: {reason}",
            retry_after_s=UNKNOWN_RETRY_S,
            cause=RefusalCause.TENANT_QUEUE_FULL,
        )
