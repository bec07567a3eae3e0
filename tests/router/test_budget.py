"""A budget: what is held adds up, stays below its bounds, and the tenant that holds most gives way."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.errors import Refused
from router.record.budget import Budget, Holding
from router.tenants import Tenant

MOST, MOST_IN_ALL = 10, 18
TENANTS = [Tenant(name=name) for name in "abc"]


def test_a_client_that_reads_is_not_ended_beside_one_that_does_not() -> None:
    budget = Budget("things", most=MOST, most_in_all=MOST)
    stuck, reads, other = (budget.holding(tenant) for tenant in (TENANTS[0], TENANTS[0], TENANTS[1]))
    assert stuck.grow(9) is None
    assert reads.grow(1) is None
    reads.shrink(1)
    assert other.grow(2) is None
    assert stuck.is_over
    assert not reads.is_over


class BudgetMachine(RuleBasedStateMachine):
    """Tenants take and give back amounts; a model knows what each request holds."""

    holdings: Bundle[Holding] = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget("things", most=MOST, most_in_all=MOST_IN_ALL)
        self.held: dict[Holding, int] = {}
        self.lost: list[Holding] = []

    @rule(target=holdings, tenant=st.sampled_from(TENANTS))
    def begin(self, tenant: Tenant) -> Holding:
        def lose(_refused: Refused) -> None:
            most = max(self.of(each.name) for each in TENANTS)
            assert self.of(tenant.name) == most, "a tenant that holds less gave way"
            assert self.held[holding], "a request that holds nothing, as its client reads, was ended"
            self.held[holding] = 0
            self.lost.append(holding)

        holding = self.budget.holding(tenant, lose)
        self.held[holding] = 0
        return holding

    def of(self, tenant: str) -> int:
        return sum(amount for holding, amount in self.held.items() if holding.tenant.name == tenant)

    @rule(holding=holdings, amount=st.integers(1, 7))
    def grow(self, holding: Holding, amount: int) -> None:
        others = [self.of(each.name) for each in TENANTS if each != holding.tenant]
        wanted, num_lost = self.of(holding.tenant.name) + amount, len(self.lost)
        may_have = not holding.is_over and wanted <= MOST
        is_free = sum(self.held.values()) + amount <= MOST_IN_ALL
        if holding.grow(amount) is None:
            assert may_have
            assert is_free or max(others) > wanted, "it was taken from tenants that held no more"
            self.held[holding] += amount
        else:
            assert not (may_have and is_free)
            assert len(self.lost) == num_lost, "others gave way for nothing"
            self.held[holding] = 0

    @rule(holding=holdings, amount=st.integers(0, 7))
    def shrink(self, holding: Holding, amount: int) -> None:
        holding.shrink(amount)
        self.held[holding] = max(0, self.held[holding] - amount)

    @rule(holding=consumes(holdings), times=st.integers(1, 2))
    def give_back(self, holding: Holding, times: int) -> None:
        for _ in range(times):
            self.budget.give_back(holding)
        self.held[holding] = 0

    @invariant()
    def adds_up(self) -> None:
        assert self.budget.num_held == sum(self.held.values()) <= MOST_IN_ALL
        for tenant in TENANTS:
            assert self.budget.held_by(tenant.name) == self.of(tenant.name) <= MOST
        assert all(holding.amount == amount for holding, amount in self.held.items())
        assert all(holding.is_over and not holding.amount for holding in self.lost)


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=100, deadline=None)
