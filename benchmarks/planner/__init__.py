"""Workers that each pool needs over a day: our planner, other autoscalers, and fixed splits, on one wave of load.

    python -m benchmarks.planner --trace mooncake_conversation.jsonl --out DIR [--arms 5P2D,ray:2:16,dynamo:0.8,ours]

Method: the trace is warped so that its rate follows a day (`measure/workload/waves.py`), with 0.18 of the peak at
night, rising from 0.2 to 0.9 of it between 6 and 9 o'clock. The day lasts an hour and a half of simulated time
(`--hours`), while a worker's start-up stays at 120 s: relative to the wave it is sixteen times slower than in a real
day, as if weights took half an hour to load, which is harder to follow. `--plays 2` plays the trace twice, with
different contents each time. The code that serves runs on a virtual clock: router, queue, policy `predictive`,
schedulers, page pools, transfers, drain, change of role (`measure/simulate/`). Step times come from a roofline of
Llama-70B on four H100 (a worker is four GPUs); pages, budgets and objectives are those of
`benchmarks/results/routing.md`.

A good request is complete, with its first token within 2 s for each started 8,192 prompt tokens and a mean gap of at
most 50 ms. GPU-hours: four times the paid time of every worker, from being asked for until it is gone, up to midnight.
Fixed splits are paid all day. The others begin with 3P1D.

Arms: `5P2D` a fixed split; `ray:P:D` or `ray:P:D:S` Ray Serve's request-based autoscaling with these
target_ongoing_requests of the pools and a downscale delay of S seconds (600); `dynamo:S` or `dynamo:S:T` Dynamo's load
mode with sensitivity S, which scales prefill at T seconds (2); both have at most ten workers in a pool; `ours` or
`ours:A` our planner with a target attainment of A. Suffixes: `+noflip`: no worker changes its pool; `+startup=240`:
another start-up time. Plans are made every 15 s.

Each arm's result is kept in DIR as JSON and not computed again. DIR also gets `table.md`.
"""
