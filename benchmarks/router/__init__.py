"""Cost of the router, beside other routers: `python -m benchmarks.router [--quick] [--parts …] [--json FILE]`.

Parts, each measured in turns with its peers in one run; medians over the rounds (5; 2 with --quick) with ranges:

- `hashing`: token ids to block hashes and the index's keys, in this process.
- `index`: prefix match, expectation, updates, memory and the removal of a dead worker, in this process. 200,000
  different blocks (10,000 with --quick); the first eighth of a prompt is held by all workers, every prompt by one
  worker and half of it by three. Updates count decoding their messages. Peer: the radix tree of ai-dynamo-runtime under
  its own interpreter, given ready hashes, as its router is; its updates are the first store of each prompt.
- `decision`: the whole choice (lapsed expectations, view of the fleet, match, policy, verification, booking, expected
  blocks) for prompts of which three quarters are known, half of the workers for prefill. The fleet has no network.
- `full`: a fleet for which 600 requests of some tenants wait: without free pages, or full of answers beside which gaps
  between tokens would exceed the requests' objective. CPU time of the router for the arrival of a request (its place in
  line), and for a report of a worker that changes nothing. No network.
- `requests`: a request's path through the router's own process: closed loop, 32 connections, a warm-up round first.
  Ours: gRPC, prompts as token ids, 2 prefill and 2 decode workers (mocks in one process), so that every request has
  two calls behind it. Peers: sglang-router and vllm-router, HTTP with server-sent events, 4 mock workers in one
  process, prompts of the same length as text, four characters a token.

Times are of the wall, and for processes also CPU time: user and system, the router's process alone (`router`), the
mocks' beside it. Clients and mocks are Python and share the machine's cores with the routers: where requests per second
matter, CPU time per request is the figure to read.

The peers. sglang-router does not set TCP_NODELAY on the connections it accepts, and keep-alive
clients then wait 40 ms for an acknowledgement; here a few lines of C (`nodelay.c`), compiled at run time and preloaded,
set it on every accepted socket; without a compiler the arm is left out. vllm-router's `cache_aware` asks every worker
to render each prompt; the mocks answer 404, as engines without that endpoint do, and it goes on without. Both tokenize
nothing here; ours hashes blocks of tokens, books, follows each request and could take it over.

Peers are installed once, each into a venv of its own. A peer that cannot be installed or does not start is named in the
output and in the JSON, with the reason; `--without-peers` leaves them all out.
"""
