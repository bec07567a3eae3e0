"""Pauses of clients when a process fails in the middle of their streams, and the time until it is replaced.

    python -m benchmarks.recovery [--rounds 10] [--only "router stopped"] [--engine fake|torch] [--json FILE]
        [--resume] [--page benchmarks/results/recovery.md]

Method. Each row is a cluster of its own: 2P+2D (launcher local) and, for workers, one router with 8 sampled streams of
128 tokens, every prompt handed over; for a prefill worker the prompts are seven times as long, so that it is reading
when the fault comes. For others: two routers and 16 streams, the even ones through router-0 and the odd ones through
router-1, by clients that know both. Seeds are fixed, and every round has prompts of its own. The fault comes once every
stream has its first tokens, for a prefill worker while it reads. When the process is back, the same requests are sent
again, undisturbed, and every text must be the same (`--engine torch`: the default model in fp32).

- `hung` (fake engine): a poison prompt, given up soon after its plan, hangs a step of one worker. All have measured
  their steps by then; before, a hang is distinguished from a compilation only after 10 minutes. For a decode worker
  there are no prefill workers, which would compute the prompt; 24 streams give every worker some.
- `slow`: the process runs one part in twenty of the time, under streams of 500 tokens (prefill: prompts that keep
  coming), with `slow_drain_s: 1` s, until it is kept out of use; then it is killed.
- `cut off`: all listeners of the worker, in both directions, in a network of this benchmark's own (root and `ip`),
  until its successor, which has other ports, serves. The worker's own calls to others are not cut.
- A controller that dies has a successor only in a Ray cluster that kvrelay joins: one is started for it. It is back
  when state.json says that it looks after everything. `stopped`: for 3 s, in which a decode worker is killed; nothing
  but its continuation brings it back, and the time until the worker is replaced counts from there.
- `head`: Ray's main processes at the head, which cluster.ray.keep_head starts again; the controller and router-0 end
  with them, and workers and router-1, on another node, do not.

Reported: failed requests, texts that differ, the largest gap between two tokens of each stream whose router died, of
each other one and of the undisturbed ones, the largest TTFT, and the seconds from the fault until the worker's
successor is ready in the router, or until the router that failed answers again. All processes, the starting ones
included, share this machine's cores.

The file is written after each row, so an interrupted run keeps what it has, and the next one, with the same file and
--resume, goes on after it. Rows that this machine cannot measure are left out, with the reason.
"""
