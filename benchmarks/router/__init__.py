"""Cost of the router: `python -m benchmarks.router [--quick] [--parts …] [--rounds N] [--json FILE]`.

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
- `tokens`: CPU time of the router's process per token that a client got. Three processes: a worker that computes
  nothing, the router as it is deployed, and this one, the client, with 64 streams of one token a step. The router's
  CPU time (user + system, from the kernel) is read before and after a window that begins when every stream runs, and
  divided by the tokens that arrived here in between; requests begin and end outside the window. Cases: `paced`, a step
  every 5 ms, where every token arrives alone; and `full`, where the worker sends as fast as it is read, so that tokens
  wait for the client's streams and are merged. Arms: `grpc alone`, a bare server that sends the same messages to the
  same client, without anything before it (its own process is measured): the part of a router's cost that is gRPC's
  sending; `shared`, as deployed; `http`, the same with the clients at the OpenAI door (a connection for each stream,
  server-sent events with text); `direct`, where the client streams from the worker and the router sees a checkpoint
  every 64 tokens. With --tls each arm is also run in a cluster with `tls.mode: on` (mutual TLS inside, TLS at the
  doors), in turns with the same arm in a cluster of one host without TLS, whose processes show each other signed
  proofs.

Times are of the wall, and for processes also CPU time: user and system, the router's process alone (`router`), the
mocks' beside it. Clients and mocks are Python and share the machine's cores with the router: where requests per second
matter, CPU time per request is the figure to read.
"""
