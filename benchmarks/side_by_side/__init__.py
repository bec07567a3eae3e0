"""One workload against kvrelay and against vLLM, all of them asked through OpenAI's API.

    python -m benchmarks.side_by_side --out DIR [--experiment FILE.yaml] [--load 1.2 ...] [--repeats 3] [--arms …]

Method. Every arm has the same two cores, model, KV memory in all, and token budget of a step; the generator shares the
cores, as everywhere here. The workload, its loads, repeats, warm-up and objectives are those of an experiment's file
(by default that of docs/examples), sent in an open loop as `kvrelay experiment` does: the same sessions to every arm,
other ones at every load and in every repeat. The arms take turns, every other repeat backwards, so that what drifts on
the machine hits all of them. kvrelay is started anew for each of its turns. vLLM, which takes a minute to start, stays
up, on a cache that has never seen the run's sessions; the CPU time that it uses in other arms' runs is told.

`kvrelay-vllm-1p1d` and `kvrelay-vllm-aggregated` are kvrelay over vLLM's engine, compiled as vLLM's server is
(`model.engine: vllm`, `model.kernels: compile`); `kvrelay-vllm-eager-…` are without `torch.compile`. `vllm-cpu-1p1d` is
vLLM's own disaggregation, two servers with its NixlConnector behind vllm-router, and has 1 GiB for KV on each; they are
started anew for each of their turns, since they take a core when they are idle.
kvrelay's processes run under this command's interpreter, which then has to be vLLM's:

    PYTHONPATH=. $(python -m benchmarks.peers) -m benchmarks.side_by_side --out DIR --load 1.4 --repeats 2 \
        --arms kvrelay-vllm-1p1d,kvrelay-vllm-aggregated,vllm-cpu                  # eight minutes on two cores

All vLLMs preload Intel's OpenMP, as vLLM's guide says.

The table has medians over the repeats, with their range. DIR keeps every run, and a page of all of them, as `kvrelay
experiment` does: the same command goes on where it was stopped.
"""
