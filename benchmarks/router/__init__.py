"""Cost of the router: `python -m benchmarks.router [--quick] [--parts …] [--json FILE]`.

Parts, each measured in turns in one run; medians over the rounds (5; 1 with --quick) with ranges:

- `hashing`: token ids to block hashes and the index's keys, in this process.
- `index`: prefix match, expectation, updates, memory and the removal of a dead worker, in this process. 200,000
  different blocks (10,000 with --quick); the first eighth of a prompt is held by all workers, every prompt by one
  worker and half of it by three. Updates count decoding their messages.
- `decision`: the whole choice (lapsed expectations, view of the fleet, match, policy, verification, booking, expected
  blocks) for prompts of which three quarters are known, half of the workers for prefill. The fleet has no network.
- `full`: a fleet for which 600 requests of some tenants wait: without free pages, or full of answers beside which gaps
  between tokens would exceed the requests' objective. CPU time of the router for the arrival of a request (its place in
  line), and for a report of a worker that changes nothing. No network.
- `requests`: a request's path through the router's own process: closed loop, 32 connections, a warm-up round first;
  gRPC, prompts as token ids, 2 prefill and 2 decode workers (mocks in one process), so that every request has two calls
  behind it.

Times are of the wall, and for processes also CPU time: user and system, the router's process alone (`router`), the
mocks' beside it. Clients and mocks are Python and share the machine's cores with the router: where requests per second
matter, CPU time per request is the figure to read.
"""
