"""Tokens per second with speculation and without, by task and batch.

    python -m benchmarks.speculation [--rounds 3] [--batches 1 8 32] [--tasks WORD ...] [--methods ngram ngram-tree ...]
        [--model FOLDER] [--draft FOLDER] [--heads FOLDER] [--eagle FOLDER] [--quantization int4] [--temperature 0]
        [--json FILE]

    python -m benchmarks.speculation --json results/speculation.json           all tasks, methods and batches
    python -m benchmarks.speculation --batches 1 --tasks rewrite code --quantization int4

Method. Engines in this process with the default model, or --model, as a worker runs them, without network and handoff:
one for each method of drafting (`ngram-tree`: with up to three drafts side by side; `--draft`, `--heads`, `--eagle`:
the checkpoint of the draft model, heads or layer; `mtp` needs a model that has such a layer), and one that computes
token by token. Tasks: rewrite a text, edit code, summarize a text, free chat; each has six documents, which come up in
turn. An answer ends where the model ends it, at the latest after 128 tokens: what it would say behind that has nothing
to do with the task. Greedy, unless --temperature is given; then request i has seed i. The arms alternate A B, B A on
the same requests, whose prompts are in the prefix cache; the first round of a task is not counted. Reported: tokens of
the batch per second, from the first token to the last, by the clock and by the CPU time of this process, which other
load moves less, and their ratios to the arm without; tokens per step of an answer; acceptance; whether all tokens were
the same; and of each goal whether the median of the rounds meets it.
Texts are topics of the Python reference as the interpreter carries it, code is of the standard library.
"""

import argparse
import colorsys
import fnmatch
import inspect
import pydoc_data.topics
import shutil
import string
import textwrap
import time
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn, spread
from common.chat_template import ChatTemplate, Conversation
from common.config import parse_config
from common.model_files import resolve_model
from common.sampling import SamplingParams
from common.text_files import load_chat_template
from worker.inprocess import LocalEngine

NUM_TOKENS = 128
OFF, NGRAM, TREE = "off", "ngram", "ngram-tree"
NUM_BRANCHES = 3
"""Most drafts side by side of `ngram-tree`."""
GOALS = {(1, "rewrite"): 3.0, (1, "code"): 3.0, (1, "summary"): 1.5, (1, "chat"): 1.1}
"""How many times as fast n-grams should be, by batch and task."""
LEAST = 0.97
"""How fast anything may be at the slowest."""
_TOPICS = ("assert", "break", "dynamic-features", "global", "integers", "pass")
_QUESTIONS = (
    "What are the advantages of learning to play an instrument?",
    "Explain to a child why the sky is blue.",
    "Give me ideas for a weekend in the mountains with friends.",
    "How do I prepare for a job interview?",
    "Write a short story about a lost key.",
    "What should I think of before I adopt a dog?",
)
_CODE = (
    colorsys.hsv_to_rgb,
    colorsys.rgb_to_hls,
    fnmatch.filter,
    shutil.copymode,
    string.capwords,
    textwrap.indent,
)


def _texts() -> list[str]:
    topics = (pydoc_data.topics.topics[name] for name in _TOPICS)
    return [" ".join(" ".join(topic.split("\n\n")[1:]).split())[:900] for topic in topics]


TASKS = {
    "rewrite": [f"Repeat the following text, and correct spelling mistakes:\n\n{text}" for text in _texts()],
    "code": [
        f"Add a type hint to each argument and print the whole code:\n\n```python\n{inspect.getsource(each)}```"
        for each in _CODE
    ],
    "summary": [f"Summarize the following text in three sentences:\n\n{text}" for text in _texts()],
    "chat": list(_QUESTIONS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch of answers."""

    token_ids: list[list[int]]
    wall_s: float
    cpu_s: float
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step brings to an answer."""
        return self.num_tokens / (self.num_tokens - self.num_accepted)


def generate(engine: LocalEngine, prompts: list[list[int]], temperature: float, *, max_tokens: int = NUM_TOKENS) -> Run:
    """Generate one batch."""
    requests = [
        (prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens))
        for i, prompt in enumerate(prompts)
    ]
    before = engine.load_report()
    answers = engine.stream_all(requests)
    first = next(answers)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    token_ids: list[list[int]] = [[] for _ in prompts]
    token_ids[first.request_idx].append(first.token_id)
    for token in answers:
        token_ids[token.request_idx].append(token.token_id)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    after = engine.load_report()
    return Run(
        token_ids=token_ids,
        wall_s=wall_s,
        cpu_s=cpu_s,
        num_drafted=after.num_drafted_tokens - before.num_drafted_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def load(
    method: str,
    max_running: int,
    *,
    model_id: str = "default",
    checkpoint: str | None = None,
    quantization: str | None = None,
) -> LocalEngine:
    """Return an engine with a method of speculation, which may have a checkpoint of its own."""
    pool = {"kv_memory_gib": 1, "max_running": max_running}
    num_branches = NUM_BRANCHES if method == TREE else 1
    speculation = {"method": NGRAM if method == TREE else method, "model": checkpoint, "num_branches": num_branches}
    model = {"id": model_id, "speculation": speculation, "quantization": quantization}
    raw = {"model": model, "pools": {"prefill": pool, "decode": pool}}
    return LocalEngine.load(parse_config(raw, source="benchmark"))


def prompt_ids(engine: LocalEngine, template: ChatTemplate, text: str) -> list[int]:
    """Return the tokens of a chat with one message."""
    rendered = template.render(Conversation(messages=({"role": "user", "content": text},)), rendered_unix_s=0)
    return list(engine.tokenizer.encode(rendered, add_special_tokens=False).ids)


def _parse_args() -> argparse.Namespace:
    parser = command_line("speculation", __doc__, rounds=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="answers in a batch")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="tasks (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default 0: greedy)")
    methods = [NGRAM, TREE, "draft", "heads", "eagle", "mtp"]
    parser.add_argument("--methods", nargs="+", default=[NGRAM, TREE], choices=methods, help="methods of drafting")
    parser.add_argument("--model", default="default", help="checkpoint of the model (default: the default model)")
    parser.add_argument("--draft", help="checkpoint of the draft model")
    parser.add_argument("--heads", help="checkpoint of the draft heads")
    parser.add_argument("--eagle", help="checkpoint of the draft layer")
    parser.add_argument(
        "--quantization", choices=["int8", "int4"], help="format of the weights, with and without drafts"
    )
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args, console, figures = _parse_args(), terminal(), Figures()
    started_s = time.monotonic()
    checkpoints = {"draft": args.draft, "heads": args.heads, "eagle": args.eagle}
    engines = {
        method: load(
            method,
            max(args.batches),
            model_id=args.model,
            checkpoint=checkpoints.get(method),
            quantization=args.quantization,
        )
        for method in (OFF, *args.methods)
    }
    template = load_chat_template(resolve_model(args.model, local_files_only=False))
    assert template is not None, f"{args.model} has no chat template"
    for batch in args.batches:
        for task in args.tasks:
            prompts = [prompt_ids(engines[OFF], template, text) for text in TASKS[task]]
            # A small batch has one document in a round: the rounds go through all of them.
            for number in range(args.rounds + 1):
                chosen = [prompts[(number + i) % len(prompts)] for i in range(batch)]
                for engine in engines.values() if batch < len(prompts) else ():
                    generate(engine, chosen, args.temperature, max_tokens=2)  # its prompt enters the cache
                runs = {arm: generate(engines[arm], chosen, args.temperature) for arm in in_turn(list(engines), number)}
                if number:
                    _add(figures, f"batch of {batch}", task, runs)
            console.print(f"{time.monotonic() - started_s:.0f} s: batch of {batch}, {task}")
    console.print(_table(figures, args))
    write_figures(
        args.json,
        figures,
        method="benchmarks/speculation.py",
        temperature=args.temperature,
        quantization=args.quantization,
    )


def _add(figures: Figures, part: str, task: str, runs: dict[str, Run]) -> None:
    off = runs[OFF]
    for arm, run in runs.items():
        figures.add(
            part, task, arm, tokens_per_s=run.num_tokens / run.wall_s, tokens_per_cpu_s=run.num_tokens / run.cpu_s
        )
        if run is not off:
            figures.add(
                part,
                task,
                arm,
                times_off=off.wall_s / run.wall_s,
                cpu_times_off=off.cpu_s / run.cpu_s,
                tokens_per_step=run.tokens_per_step,
                acceptance=run.num_accepted / run.num_drafted if run.num_drafted else 0.0,
                same_tokens=float(run.token_ids == off.token_ids),
            )


def _table(figures: Figures, args: argparse.Namespace) -> Table:
    """Return a line for each task, method and batch: medians of the rounds with their ranges, and the goal."""
    heads = (
        "tokens a step",
        "drafts right",
        "tokens/s",
        "off, tokens/s",
        "times off",
        "by CPU time",
        "tokens",
        "goal",
    )
    table = Table("task", "batch", "method", *heads)
    for batch in args.batches:
        for task in args.tasks:
            for method in args.methods:
                table.add_row(task, str(batch), method, *_cells(figures, batch, task, method))
    return table


def _cells(figures: Figures, batch: int, task: str, method: str) -> list[str]:
    def rounds(arm: str, unit: str) -> list[float]:
        figure = figures.all.get((f"batch of {batch}", task, arm, unit))
        return [] if figure is None else figure.rounds

    times = rounds(method, "times off")
    goal = GOALS.get((batch, task), LEAST) if method in {NGRAM, TREE} else LEAST
    found = median(times)
    return [
        spread(rounds(method, "tokens per step")),
        spread(rounds(method, "acceptance")),
        spread(rounds(method, "tokens per s")),
        spread(rounds(OFF, "tokens per s")),
        spread(times),
        spread(rounds(method, "cpu times off")),
        "the same" if min(rounds(method, "same tokens")) == 1.0 else "OTHERS",
        f"{goal:g} x off {'met' if found >= goal else 'missed'}: {found:.2f}",
    ]


if __name__ == "__main__":
    main()
