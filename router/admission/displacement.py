"""Who makes room in a full line: each tenant can always hold its weighted share of it, and the rest is borrowed.

While the line has room anybody may stand in it: what some tenants leave free, others borrow, one tenant alone all of
it. When it is full, the *load* of a tenant is the number of its waiting requests divided by its weight. A newcomer
whose tenant would, with it, have a lower load than the tenant with the highest takes the place of that one's newest
request, which is refused; else the newcomer is refused itself. (Longest queue drop, as in the buffers of switches, by
weight.) So, with `max_queued` places and W the sum of the weights of all tenants, those that are away included:

1. No tenant is refused within its reservation, max_queued · weight / W, while another is above its own. If every other
   load were at most the newcomer's, which is at most max_queued / W, the line would have a place left.
2. No tenant loses a request within its reservation: the highest load of a full line is above max_queued / W.
3. Two tenants never displace each other in turn: whoever was displaced would come back with the higher load.

Reservations need no list of tenants, and one of a tenant that is away costs the others nothing.
"""

from collections.abc import Iterable

from router.admission.account import Account


def account_above(newcomer: Account, accounts: Iterable[Account]) -> Account | None:
    """Return the account whose newest waiting request gives way to one more of the newcomer's; None: none does."""
    highest = max((account for account in accounts if account.waiting), key=_load, default=None)
    if highest is None or _load(highest) <= (newcomer.num_queued + 1) / newcomer.tenant.weight:
        return None
    return highest


def _load(account: Account) -> float:
    return account.num_queued / account.tenant.weight
