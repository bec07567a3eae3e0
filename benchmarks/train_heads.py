"""Trains Medusa heads for the default model on its own answers, and says how often each of them is right.

    python -m benchmarks.train_heads FOLDER [--heads 3] [--answers 1280] [--epochs 4]

Method. The model answers questions about topics of the Python reference and about everyday things (sampled
at 0.8, 96 tokens), in this process, and its hidden states are kept. Head k learns the token k + 1 places behind the
model's own next one (Medusa-1: the model is frozen), with its output head, among the tokens that occur in the answers.
One answer in ten is kept out and judged with the whole vocabulary. FOLDER can then be `model.speculation.model` with
`method: heads`. Some minutes on two cores.
"""

import itertools
import json
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.command import command_line, terminal
from benchmarks.speculation import load, prompt_ids
from common.model_files import default_model_dir, resolve_model
from common.sampling import SamplingParams
from common.text_files import load_chat_template
from engine.executor import DoneStep, Hidden, ScheduledSequence
from engine.model.heads import FILE_NAME
from engine.runner import KeptStates, ModelExecutor
from worker.inprocess import LocalEngine

BATCH = 32
NUM_TOKENS = 96
_THINGS = (
    "the moon", "bread", "a bicycle", "rain", "the heart", "a bank account", "chess", "coffee", "trains", "volcanoes",
    "a library", "the ocean", "sleep", "electricity", "a garden", "running", "the guitar", "cheese", "maps", "clouds",
    "a contract", "dogs", "the brain", "glass", "soccer", "paper", "a recipe for soup", "honey", "the stars", "winter",
)  # fmt: skip
_ASKS = (
    "Explain {} to a child.", "Write a short story about {}.", "What are three facts about {}?",
    "Give me tips about {}.", "Why is {} important?",
)  # fmt: skip
_TOPIC_ASKS = ("Explain this in simple words:\n\n{}", "Summarize the following text:\n\n{}", "Repeat this text:\n\n{}")


def questions(number: int) -> list[str]:
    """Return questions, none of which the benchmark of speculation asks."""
    topics = [" ".join(text.split())[900:1500] for text in pydoc_data.topics.topics.values() if len(text) > 1500]
    about_things = [ask.format(thing) for thing, ask in itertools.product(_THINGS, _ASKS)]
    about_topics = [ask.format(text) for text, ask in itertools.product(topics, _TOPIC_ASKS)]
    order = np.random.default_rng(0).permutation(len(about_things) + len(about_topics))
    return [(about_things + about_topics)[i] for i in itertools.islice(itertools.cycle(order), number)]


class Watched:
    """Stands before an executor and keeps the hidden state behind each token."""

    def __init__(self, executor: ModelExecutor[Any]) -> None:
        self.states: dict[tuple[str, int], Hidden] = {}
        """States by request and the token's index in its answer."""
        self._launch = executor.launch
        executor.kept_states = KeptStates(num_tokens=1)
        executor.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Sequence[ScheduledSequence]) -> DoneStep:
        """Run a step."""
        places = [(item.sequence.request.request_id, item.token_index) for item in batch]
        done = self._launch(batch)
        for place, result in zip(places, done.step_results, strict=True):
            if result.states is not None:
                self.states[place] = result.states[-1]
        return done


def answer_batches(engine: LocalEngine, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the model's answers, sampled, a batch at a time."""
    for begin in range(0, len(prompts), BATCH):
        part = prompts[begin : begin + BATCH]
        tokens: list[list[int]] = [[] for _ in part]
        requests = [
            (prompt, SamplingParams(temperature=0.8, seed=begin + i, max_tokens=NUM_TOKENS))
            for i, prompt in enumerate(part)
        ]
        for token in engine.stream_all(requests):
            tokens[token.request_idx].append(token.token_id)
        yield tokens


def answer_all(engine: LocalEngine, prompts: list[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    """Return the model's answers, sampled, and the hidden states behind their tokens."""
    assert isinstance(engine.executor, ModelExecutor)
    watched = Watched(engine.executor)
    answers: list[list[int]] = []
    states: list[Tensor] = []
    for tokens in answer_batches(engine, prompts):
        answers += tokens
        # Requests enter in order, and their ids are those of their states.
        ids = list(dict.fromkeys(request_id for request_id, _index in watched.states))
        for request_id, answer in zip(ids, tokens, strict=True):
            rows = [watched.states[request_id, index] for index in range(len(answer))]
            states.append(torch.from_numpy(np.stack(rows)))
        watched.states.clear()
    return answers, states


def output_head() -> Tensor:
    """Return the model's output head [vocab, hidden], which is its embedding."""
    with safe_open(default_model_dir() / "model.safetensors", framework="pt") as tensors:
        found: Tensor = tensors.get_tensor("model.embed_tokens.weight").float()
    return found


def examples(states: list[Tensor], answers: list[list[int]], num_heads: int) -> tuple[Tensor, Tensor]:
    """Return hidden states [n, hidden] and the tokens behind the model's next one [n, heads]."""
    inputs, targets = [], []
    for state, answer in zip(states, answers, strict=True):
        num_examples = len(answer) - num_heads
        if num_examples > 0:
            inputs.append(state[:num_examples])
            targets.append(torch.tensor(answer[1:]).unfold(0, num_heads, 1)[:num_examples])
    return torch.cat(inputs), torch.cat(targets)


def train(inputs: Tensor, targets: Tensor, output: Tensor, num_epochs: int) -> tuple[Tensor, Tensor]:
    """Return weights [heads, in, out] and biases [heads, 1, out]."""
    num_heads, hidden_size = targets.shape[1], inputs.shape[1]
    kept = torch.from_numpy(np.unique(targets.numpy()))
    place = torch.full((len(output),), -1)
    place[kept] = torch.arange(len(kept))
    targets, output = place[targets], output[kept].bfloat16()
    weight = torch.zeros(num_heads, hidden_size, hidden_size, requires_grad=True)
    bias = torch.zeros(num_heads, 1, hidden_size, requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], lr=1e-3, weight_decay=0.01)
    num_steps = num_epochs * (len(inputs) // 512 + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=num_steps)
    for _ in range(num_epochs):
        for rows in torch.split(torch.randperm(len(inputs)), 512):
            states = inputs[rows].expand(num_heads, -1, -1)
            states = states + torch.nn.functional.silu(torch.baddbmm(bias, states, weight))
            logits = (states.bfloat16() @ output.T).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].T.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return weight.detach(), bias.detach()


@torch.inference_mode()
def hit_rates(inputs: Tensor, targets: Tensor, output: Tensor, weight: Tensor, bias: Tensor) -> list[float]:
    """Return how often each head's likeliest token is right, whatever the heads before it say."""
    states = inputs.expand(len(weight), -1, -1)
    states = states + torch.nn.functional.silu(torch.baddbmm(bias, states, weight))
    return [float(((s @ output.T).argmax(-1) == targets[:, k]).float().mean()) for k, s in enumerate(states)]


def main() -> None:
    """Train, judge and write."""
    parser = command_line("heads", __doc__, rounds=1)
    parser.add_argument("folder", type=Path, help="where the heads are written")
    parser.add_argument("--heads", type=int, default=3, help="heads (default: 3)")
    parser.add_argument("--answers", type=int, default=1280, help="answers to learn from (default: 1280)")
    parser.add_argument("--epochs", type=int, default=4, help="times that each is seen (default: 4)")
    args = parser.parse_args()
    console, began_s = terminal(), time.perf_counter()
    torch.manual_seed(0)
    engine = load("off", BATCH)
    template = load_chat_template(resolve_model("default", local_files_only=False))
    assert template is not None, "the default model has a chat template"
    prompts = [prompt_ids(engine, template, text) for text in questions(args.answers)]
    answers, states = answer_all(engine, prompts)
    output = output_head()
    num_learnt = len(prompts) * 9 // 10
    inputs, targets = examples(states[:num_learnt], answers[:num_learnt], args.heads)
    console.print(f"{len(inputs)} examples after {time.perf_counter() - began_s:.0f} s")
    weight, bias = train(inputs, targets, output, args.epochs)
    kept_out = examples(states[num_learnt:], answers[num_learnt:], args.heads)
    rates = hit_rates(*kept_out, output, weight, bias)
    console.print(f"right on {len(kept_out[0])} others: " + ", ".join(f"{rate:.0%}" for rate in rates))
    args.folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{k}.0.linear.weight": weight[k].T.contiguous() for k in range(args.heads)}
    tensors |= {f"{k}.0.linear.bias": bias[k, 0].contiguous() for k in range(args.heads)}
    save_file(tensors, args.folder / FILE_NAME)
    facts = {"medusa_num_heads": args.heads, "medusa_num_layers": 1, "base_model": "SmolLM2-135M-Instruct"}
    (args.folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    console.print(f"written to {args.folder} after {time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
