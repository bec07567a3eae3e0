"""The cost of grammars to a batch in which some answers are structured.

    python -m benchmarks.structured [--rounds 5] [--json FILE]

Method. One engine in this process with the default model in bfloat16 on all cores, 32 answers of 64 tokens in one
batch, prompts of 32 random token ids. Arms, in turns: none of the answers is structured, 8 are, or all are; their
schema is a list of at least 200 integers, which no answer completes. Plain answers are sampled, too, at temperature 1.
Reported: tokens of the whole batch, prompts included, per second and per second of CPU time, which other load moves
less; and their ratios to the plain arm of the same round. Each round begins with another arm. The grammar is
compiled in the first, uncounted round.
"""

import time

import numpy as np

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from common.config import parse_config
from common.sampling import SamplingParams
from common.structured_outputs import structure_text
from worker.inprocess import LocalEngine

NUM_ANSWERS, NUM_TOKENS, NUM_PROMPT_TOKENS = 32, 64, 32
ARMS = {"plain": 0, "8 of 32 structured": 8, "all structured": NUM_ANSWERS}
STRUCTURE = structure_text({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 200}})
VOCAB = (1000, 40_000)


def speeds_of(engine: LocalEngine, rng: np.random.Generator, *, num_structured: int) -> tuple[float, float]:
    """Generate one batch and return its tokens per second, and per second of CPU time."""
    requests = [
        (
            rng.integers(*VOCAB, NUM_PROMPT_TOKENS).tolist(),
            SamplingParams(
                temperature=1.0,
                seed=number,
                max_tokens=NUM_TOKENS,
                ignore_eos=number >= num_structured,
                structured_outputs=STRUCTURE if number < num_structured else "",
            ),
        )
        for number in range(NUM_ANSWERS)
    ]
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    num_tokens = sum(1 for _ in engine.stream_all(requests))
    return num_tokens / (time.perf_counter() - started_s), num_tokens / (time.process_time() - started_cpu_s)


def main() -> None:
    """Run the benchmark."""
    args = command_line("structured", __doc__, rounds=5).parse_args()
    console, figures = terminal(), Figures()
    pool = {"kv_memory_gib": 0.5, "max_running": NUM_ANSWERS}
    engine = LocalEngine.load(parse_config({"pools": {"prefill": pool, "decode": pool}}, source="benchmark"))
    rng = np.random.default_rng(7)
    for number in range(args.rounds + 1):
        arms = [*ARMS][number % len(ARMS) :] + [*ARMS][: number % len(ARMS)]
        found = {arm: speeds_of(engine, rng, num_structured=ARMS[arm]) for arm in arms}
        plain, plain_cpu = found["plain"]
        for arm in ARMS if number else ():
            speed, cpu = found[arm]
            ratios = {"times_plain": speed / plain, "cpu_times_plain": cpu / plain_cpu}
            figures.add("batch of 32", "decode", arm, tokens_per_s=speed, tokens_per_cpu_s=cpu, **ratios)
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/structured.py")


if __name__ == "__main__":
    main()
