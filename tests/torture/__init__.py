"""Torture of a real cluster: `make torture`, or `python -m tests.torture --minutes 3 --seed 7`.

Processes of a cluster with fake engines are killed, stopped, throttled, cut off, starved of descriptors, of memory and
of disk space, one after the other and on top of each other, while sampled streams run. Each kind that this machine
cannot do is left out, and the log says why. One decode worker and one router are spared at any time, so no request may
fail.

Oracles: every token is that of an undisturbed engine; no request fails; when the faults end, every pool is whole within
`WHOLE_S` and nothing is held.
"""
