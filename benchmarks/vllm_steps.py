"""How long does the host take for a step over vLLM's model runner, in our engine and in vLLM's own.

    PYTHONPATH=. $(python -m benchmarks.peers) -m benchmarks.vllm_steps [--rounds 3] [--json FILE]

Method. 1, 16 and 64 sequences decode behind prompts of 128 tokens, greedily, on the default model in bfloat16 with all
cores; no text is made of the tokens. An arm's sample is its median over 80 steps after those that compute the prompts
and 20 more. `model` is the time inside the model and its output head, which both engines call; `host` the rest of
a step: scheduling, batch preparation, sampling and bookkeeping; `cpu` the CPU time of all threads, which other work on
the machine changes least. The arms, each in a process of its own, in turn:

    kvrelay-eager   our scheduler, pages and sampler over vLLM's model runner (`model.engine: vllm`)
    kvrelay         the same with `model.kernels: compile`; the first run compiles for a minute or two
    vllm-eager      vLLM's engine without torch.compile
    vllm            vLLM's engine as it is by default; the first run compiles as well
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn
from benchmarks.peers.vllm_server import vllm_environment
from benchmarks.vllm_step import ARMS
from common.cgroups import usable_cores

_BATCHES = (1, 16, 64)


def _run_arm(arm: str, batch: int) -> dict[str, float]:
    """Measure an arm in a process of its own. Raises RuntimeError with its last words."""
    environment = vllm_environment(Path(sys.prefix), threads=usable_cores(), kv_memory_gib=1)
    command = [sys.executable, "-m", "benchmarks.vllm_step", arm, str(batch)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{arm} has failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the benchmark."""
    parser = command_line("vllm_steps", __doc__, rounds=3)
    parser.add_argument("--batch", type=int, nargs="*", default=_BATCHES, help="sequences")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    for number in range(args.rounds):
        for batch in args.batch:
            for arm in in_turn(ARMS, number):
                figures.add("a step", f"{batch} sequences", arm, **_run_arm(arm, batch))
        console.print(f"round {number + 1} of {args.rounds}")
    figures.show(console, base="vllm-eager")
    write_figures(args.json, figures, method="benchmarks/vllm_steps.py")


if __name__ == "__main__":
    main()
