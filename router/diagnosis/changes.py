"""Predicts from fitted timing models and measured shares what a change would bring, or says why it cannot be told."""

import math

from router.diagnosis.pool import Pool

_SATURATED = 0.98
"""Busy share above which a queue has no mean: it grows as long as the load lasts."""
_SPREAD = 0.05
"""Doubt about a measured busy share, for the interval of a predicted wait."""
_WEIGHT_BYTES = {"int8": 8.5 / 16, "int4": 5.0 / 16}
"""Bytes of a weight and its share of scales and offsets, as a multiple of bfloat16's."""


def one_more_reader(pool: Pool, wait_s: float) -> str:
    """Return what another worker would do to the mean wait for prefill."""
    num_workers, busy = len(pool.workers), max(_SPREAD, pool.busy_share)
    name = f"a {pool.name} worker more"
    if busy >= _SATURATED:
        return (
            f"{name}: {1 / num_workers:.0%} more prompts per second; what it does to the wait cannot be told,"
            " because a pool without pause has a queue without a mean"
        )
    expected, low, high = (
        wait_s * _wait(share * num_workers / (num_workers + 1), num_workers + 1) / _wait(share, num_workers)
        for share in (busy, max(_SPREAD, busy - _SPREAD), min(_SATURATED, busy + _SPREAD))
    )
    return f"{name}: wait {wait_s:.2g} s → about {expected:.2g} s ({min(low, high):.2g} to {max(low, high):.2g})"


def _wait(busy_share: float, num_workers: int) -> float:
    """Return the mean wait in units of a service time (Sakasegawa, An approximation formula, 1977)."""
    return float(busy_share ** (math.sqrt(2 * (num_workers + 1)) - 1) / (num_workers * (1 - busy_share)))


def one_more_decoder(pool: Pool) -> str:
    """Return what another decode worker would do to a step."""
    num_workers, batch, context = len(pool.workers), pool.mean_batch, pool.mean_context
    now_s = pool.decode_step_s(batch, context)[0]
    after_s, low_s, high_s = pool.decode_step_s(batch * num_workers / (num_workers + 1), context)
    return (
        f"a decode worker more: batch {batch:.1f} → {batch * num_workers / (num_workers + 1):.1f}, a step"
        f" {_ms(now_s)} → {_ms(after_s)} ({_ms(low_s)} to {_ms(high_s)} by worker)"
    )


def fewer_weight_bits(pool: Pool) -> str:
    """Return the most that int8 and int4 weights could save of a decode step."""
    decode_s, weights_s = pool.total("decode_s"), pool.total("decode_weights_s")
    if not weights_s or not decode_s:
        return "int8 or int4 weights: cannot tell, the workers have not measured their memory"
    share = min(1.0, weights_s / decode_s)
    savings = " and ".join(f"{name} at most {share * (1 - part):.0%}" for name, part in _WEIGHT_BYTES.items())
    return f"int8 or int4 weights: reading weights takes {share:.0%} of a decode step; {savings} less time"


def speculation(pool: Pool) -> str:
    """Return what drafts have brought."""
    num_drafted = sum(worker.status.num_drafted_tokens for worker in pool.workers)
    num_accepted = sum(worker.status.num_accepted_tokens for worker in pool.workers)
    if not num_drafted:
        return "speculation: cannot tell, no token was drafted; model.speculation turns it on"
    return f"speculation: {num_accepted / num_drafted:.0%} of {num_drafted} drafted tokens were right so far"


def larger_cache(evicted_share: float, saved_s: float) -> str:
    """Return what caches of about twice the size would save."""
    return (
        f"twice the pages (num_blocks, or kv_dtype int8 in the same memory): up to {evicted_share:.0%} of the computed"
        f" tokens found, about {saved_s:.2g} s less for a request"
    )


def other_split(reader: Pool, decoder: Pool) -> str | None:
    """Return which pool could give a worker to the other; None while both are about as busy."""
    for giver, taker in ((decoder, reader), (reader, decoder)):
        if len(giver.workers) > 1 and giver.busy_share < 0.5 * taker.busy_share:
            return (
                f"another split: {giver.name} workers are busy {giver.busy_share:.0%} of the time,"
                f" {taker.name} workers {taker.busy_share:.0%}; `kvrelay scale` or a flip moves one"
            )
    return None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
