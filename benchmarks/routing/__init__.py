"""Where requests should go: goodput of every placement policy on production traffic, in virtual time.

    python -m benchmarks.routing --trace mooncake_conversation.jsonl [--requests 1500] [--jobs 1]
        [--parts overload,waves,tenants,base] [--out DIR]

Method: the first requests of the trace are replayed by the code that serves (`measure/simulate/`), on two fleets of
eight workers: `4P4D`, with steps of 2,048 tokens, and `8` aggregated ones, with steps of 512. Step times come from a
roofline of Llama-70B on four H100. A good request is complete, with its first token within 2 s for each started 8,192
prompt tokens and a mean gap of at most 50 ms. Seed 0, cold caches; a cell is a function of its settings.

Parts:
- `base`: every policy at three speeds, without a refusal before a request's deadline of an hour. A policy that is below
  3 % good requests at one speed is not replayed at the next.
- `overload`: four policies with `shed: slo` at 1, 2, 4 and 8 times the trace's rate. At twice the rate the trace's
  work is just below what eight workers do; that is taken as capacity. `dynamo` and `least_load` predict no first token,
  so routers with them refuse little; `…_with_forecast` refuses what they would serve late. Both forms are run.
- `waves`: the policies that predict, on a square wave (a minute at half the rate, a minute at three times) and on a
  burst (20 s at eight times), which are the trace with its clock warped (`measure/workload/waves.py`).
- `tenants`: the trace's last eleventh is the quiet tenant's, stretched over the time of the rest, the loud one's. Both
  have equal shares and share no prefix. Arms: the quiet tenant alone; alone on half of the workers; both; both with one
  account for the two.

`base`, `overload` and `waves` are the comparisons of `kvrelay simulate`, with its tables, plots and upper bound
(`measure/simulate/bound.py`), each in a folder of DIR (default: bench-results/routing); `tenants` writes tenants.json.
Finished cells are kept there, so the same command continues where it stopped.
"""
