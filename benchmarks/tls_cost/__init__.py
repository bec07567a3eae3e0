"""Cost of TLS: `python -m benchmarks.tls_cost [--quick] [--parts …] [--json FILE]`.

Two arms: `off`, a cluster on one host with `tls.mode: off`, whose processes show each other signed proofs; and `on`,
the same with `tls.mode: on`, mutual TLS between all processes and TLS at the doors. Both run side by side for the whole
part and are measured in turns, the first one changing from round to round, with the same prompts; a warm-up round is
dropped. Reported: the median over the rounds (5, of `latency` 25; 1 and 5 with --quick) with the range, and the median
of the rounds' ratios on/off with their quartiles; p99 is that of all rounds together. Tickets are signed and checked in
both arms. Before each part the machine is watched for a second: how busy others keep it stands beside the figures.

Parts:

- `latency`: whole clusters (`kvrelay up`'s, launcher local, 1P+1D), gRPC clients, every prompt new and handed over
  (`local_prefill_max_tokens: 0`), KV over gRPC as between hosts. TTFT and gaps between tokens are the client's. The
  fake engine at 5 ms a step: rounds of 24 requests, 4 at a time, 200 prompt tokens, 24 output tokens. SmolLM2-135M (a
  thread each): rounds of 2 requests, one at a time, 200 prompt tokens, 4 output tokens.
- `tokens`: CPU time of the router's process per token that clients got, 64 streams (8 with --quick) at 5 ms a step, as
  in `benchmarks.token_path`: gRPC door, HTTP door, and `direct`; and that of the worker's process, which sends to the
  router or to the clients. A router that has little time merges tokens, so the tokens in a message are shown, too.
- `requests`: CPU time of the router's process per request of one token; connections are there before the clock starts.
  gRPC: prompts of 50 tokens, two calls to workers (`benchmarks.router`'s mocks) and a ticket for each. HTTP: a request
  of 4 tokens to one worker.
- `kv`: bytes per second, and CPU time per GiB of both ends, from one process to another over transport grpc: pulls of
  512 pages (32 with --quick) of SmolLM2-135M by the workers' own code (kv_transfer/), a ticket each, without an engine.
- `parts`: a ticket and a proof signed and checked, in this process; one call on a connection that is there, and one
  on a new connection with its handshake, to a process that is idle: wall time, and CPU time of that process.

CPU time is user and system, from the kernel, of all threads of a process.
"""
