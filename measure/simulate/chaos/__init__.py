"""A random walk through failures: what dies, stops, hangs, slows down, is cut off, or arrives late, twice or never.

The real routers and workers run under a virtual clock, over the fake engine, whose tokens depend on every byte of KV
that it reads, and over the simulated network, which carries these bytes. Each seed draws a cluster and the kinds of
faults that befall it (`settings.py`); the same seed is the same walk. `oracles.py` says what must hold.

    python -m measure.simulate.chaos --seeds 1-200
"""
