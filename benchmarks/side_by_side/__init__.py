"""One workload against kvrelay and against vLLM, all of them asked through OpenAI's API.

    python -m benchmarks.side_by_side --out DIR [--experiment FILE.yaml] [--load 1.2 ...] [--repeats 3] [--arms …]

Method. Every arm has the same two cores, model, KV memory in all, and token budget of a step; the generator shares the
cores, as everywhere here. A run sends an experiment's workload (by default that of docs/examples) in an open loop, the
same sessions to every arm, other ones at every load and in every repeat. The arms take turns, every other repeat
backwards, so that what drifts on the machine hits all of them. kvrelay is started anew for each run. vLLM, which takes
a minute to start, stays up, on a cache that has never seen the run's sessions; the CPU time that it uses in other arms'
runs is told. Each run is preceded by one that is thrown away.

Shown are medians over the repeats, with their range. DIR keeps every run as `kvrelay bench compare` reads it.
"""
