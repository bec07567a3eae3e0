"""Displacement in a full line: each tenant can always hold its weighted share; the rest is borrowed.

While the line has room, any request may wait in it: tenants borrow what others leave free, one tenant alone all of it.
In a full line, the *load* of a tenant is the number of its waiting requests divided by its weight. If the newcomer's
tenant would, with it, have a lower load than the tenant with the highest, the newcomer takes the place of that
tenant's newest request, which is refused; otherwise the newcomer is refused. (Longest queue drop, as in the buffers of
switches, by weight.) With `max_queued` places and W the sum of the weights of all tenants, absent ones included:

1. No tenant is refused within its reservation, max_queued · weight / W, while another is above its own. If every other
   load were at most the newcomer's, which is at most max_queued / W, the line would have a place left.
2. No tenant loses a request within its reservation: the highest load of a full line is above max_queued / W.
3. Two tenants never displace each other in turn: a displaced request would come back with the higher load.

Reservations need no list of tenants, and the reservation of an absent tenant costs the others nothing.
"""

from collections.abc import Iterable

from router.admission.account import Account


def account_above(newcomer: Account, accounts: Iterable[Account]) -> Account | None:
    """Return the account whose newest waiting request gives way to one more of the newcomer; None: refuse that one."""
    highest = max((account for account in accounts if account.waiting), key=_load, default=None)
    if highest is None or _load(highest) <= (newcomer.num_queued + 1) / newcomer.tenant.weight:
        return None
    return highest


def _load(account: Account) -> float:
    return account.num_queued / account.tenant.weight
