"""Trains a draft layer of EAGLE-3 for the default model on its own answers, and says how often it is right.

    python -m benchmarks.train_eagle FOLDER [--answers 1600] [--passes 2] [--depths 2] [--vocab 6144]

Method. The model answers the questions of `benchmarks.train_heads` (sampled at 0.8, 96 tokens), and reads the answers,
with the last tokens of their prompts, once more for its states. The layer begins as a copy of the model's last one, on
the state before the last layers, and learns the model's whole distribution, cut to the tokens that occur most, not the
tokens that were drawn. It learns to go on from its own outputs as it will have to (EAGLE-3's training-time test, Li et
al., 2503.01840, section 3.1): at depth k it reads what it said itself at depth k - 1, and attends to the model's states
up to k tokens back and to its own behind these. Embedding, and the rows of the output head, are the model's and stay.
One answer in ten is kept out and judged: the likeliest token, against the model's, where the tokens before it are
right. FOLDER can then be `model.speculation.model` with `method: eagle`.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from benchmarks.command import command_line, terminal
from benchmarks.speculation import load, prompt_ids
from benchmarks.train_heads import BATCH, answer_batches, questions
from common.block_hash import NO_HASHES
from common.ids import HashRoot, RequestId
from common.model_files import default_model_dir, resolve_model
from common.sampling import SamplingParams
from common.text_files import load_chat_template
from common.tokens import as_tokens
from engine.executor import ScheduledSequence
from engine.model.eagle_checkpoint import SAFETENSORS, tapped_layers
from engine.request import EngineRequest
from engine.runner import KeptStates, ModelExecutor
from engine.sequence import Sequence as EngineSequence

NUM_PROMPT_TOKENS = 24
"""Last tokens of a prompt that the layer reads."""
BATCH_ANSWERS = 16
SHARE = 0.3
"""Share of the tokens whose distribution is learnt at each pass and depth: the output head is most of the work."""
DEPTH_WEIGHT = 0.8
"""Weight of a depth, in proportion to that before it."""
NUM_JUDGED = 4
"""Places of a draft that are judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An answer with the end of its prompt, as the layer reads it: token i with the state before it."""

    token_ids: Tensor
    """int64 [n], from the second token on."""
    states: Tensor
    """States before the tokens, bfloat16 [n, 3 * hidden]."""
    last: Tensor
    """Residual stream of the model at the tokens, after its last layer, bfloat16 [n, hidden]."""


def read_examples(executor: ModelExecutor[Any], texts: Sequence[tuple[list[int], list[int]]]) -> Iterator[Example]:
    """Yield examples of prompts and answers. Overwrites pages of the executor."""
    num_layers, block_size = executor.kv.shape.num_layers, executor.kv.shape.block_size
    executor.kept_states = KeptStates(num_tokens=1 << 20, layers=(*tapped_layers(num_layers), num_layers))
    for prompt, answer in texts:
        request = EngineRequest(
            request_id=RequestId("example"),
            prompt_token_ids=as_tokens(prompt + answer),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            hash_root=HashRoot(bytes(32)),
            block_hashes=NO_HASHES,
        )
        sequence = EngineSequence.from_request(request, block_size=block_size, order=0)
        num_tokens = sequence.num_tokens
        sequence.block_table.extend(range(-(-num_tokens // block_size)))
        (result,) = executor.launch([ScheduledSequence(sequence, num_tokens, 1)]).results()
        first = max(0, len(prompt) - NUM_PROMPT_TOKENS)
        states = torch.from_numpy(result.states)[first:].bfloat16()
        size = states.shape[1] // 4
        yield Example(
            token_ids=torch.tensor((prompt + answer)[first + 1 :]),
            states=states[:-1, : 3 * size],
            last=states[1:, 3 * size :],
        )


class Layer:
    """The layer that learns, in float32 with products in bfloat16."""

    def __init__(self, model: dict[str, Tensor], config: dict[str, Any], token_ids: Tensor) -> None:
        """Begin with the last layer of the model; draft `token_ids`."""
        self.config = config
        self.token_ids = token_ids
        self.embedding = model["model.embed_tokens.weight"]
        self.head = self.embedding[token_ids]
        self.model_norm = model["model.norm.weight"]
        size, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
        weights = {name.removeprefix(last): each.clone() for name, each in model.items() if name.startswith(last)}
        for name in "qkv":  # it reads the embedding, too
            weight = weights[f"self_attn.{name}_proj.weight"]
            weights[f"self_attn.{name}_proj.weight"] = torch.cat((weight / 2, weight), dim=1)
        weights["hidden_norm.weight"] = weights["input_layernorm.weight"].clone()
        weights["input_layernorm.weight"] = torch.ones(size)
        weights["norm.weight"] = self.model_norm.clone()
        noise = 0.01 * (3 * size) ** -0.5 * torch.randn(size, 3 * size)
        weights["fc.weight"] = noise + torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), dim=1)
        self.weights = {name: weight.requires_grad_() for name, weight in weights.items()}

    def product(self, x: Tensor, name: str) -> Tensor:
        """Return the product with a weight."""
        return _product(x, self.weights[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the norm with a weight."""
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def depths(self, token_ids: Tensor, states: Tensor, is_known: Tensor, num_depths: int) -> Iterator[Tensor]:
        """Yield the layer's outputs [batch, tokens, hidden], depth by depth, each from those of the depth before."""
        embedded = self.norm(self.embedding[token_ids], "input_layernorm")
        residual = self.product(states, "fc")
        written: list[tuple[Tensor, Tensor]] = []
        for depth in range(num_depths):
            if depth:
                residual = _shift(residual, 1)
            inputs = torch.cat((embedded, self.norm(residual, "hidden_norm")), dim=-1)
            residual = residual + self._attend(inputs, written, is_known)
            normed = self.norm(residual, "post_attention_layernorm")
            gated = F.silu(self.product(normed, "mlp.gate_proj")) * self.product(normed, "mlp.up_proj")
            residual = residual + self.product(gated, "mlp.down_proj")
            yield residual

    def _attend(self, inputs: Tensor, written: list[tuple[Tensor, Tensor]], is_known: Tensor) -> Tensor:
        """Return the attention of a depth; `written` has keys and values of those before it, and gets this one's."""
        head_dim, depth, num_tokens = self.config["head_dim"], len(written), inputs.shape[1]
        query, key, value = (
            self.product(inputs, f"self_attn.{name}_proj")
            .reshape(len(inputs), num_tokens, -1, head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        repeats = query.shape[1] // key.shape[1]
        query = self._turn(query) * head_dim**-0.5
        written.append((self._turn(key).repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
        place = torch.arange(num_tokens)
        is_seen = (place <= place[:, None] - depth) & is_known[:, None, None]
        scores = (query @ written[0][0].transpose(-1, -2)).masked_fill(~is_seen, -1e9)
        # The token that lies j places back was read at depth - j.
        own = [(_shift(keys, depth - i), _shift(values, depth - i)) for i, (keys, values) in enumerate(written) if i]
        own_scores = [(query * keys).sum(-1, keepdim=True) for keys, _values in own]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(-1)
        attended = weights[..., :num_tokens] @ written[0][1]
        for i, (_keys, values) in enumerate(own, num_tokens):
            attended = attended + weights[..., i : i + 1] * values
        return self.product(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")

    def _turn(self, heads: Tensor) -> Tensor:
        """Return heads [batch, heads, tokens, head_dim] rotated to their positions."""
        size, theta = heads.shape[-1], self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(heads.shape[-2])[:, None] * theta ** (-torch.arange(0, size, 2) / size)
        cos, sin = torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((angles.sin(),) * 2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    def looks(self, examples: Sequence[Example], num_depths: int, share: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each depth, at a share of the tokens, the logits [n, drafted tokens] and the states of the model.

        The states are final and normalised, [n, hidden].
        """
        pad = torch.nn.utils.rnn.pad_sequence
        token_ids = pad([each.token_ids for each in examples], batch_first=True)
        states = pad([each.states for each in examples], batch_first=True)
        last = pad([each.last for each in examples], batch_first=True)
        is_known = pad([torch.ones(len(each.token_ids), dtype=torch.bool) for each in examples], batch_first=True)
        chosen = is_known
        for depth, output in enumerate(self.depths(token_ids, states, is_known, num_depths)):
            chosen = chosen & _shift(chosen[..., None], 1)[..., 0].bool() if depth else chosen
            taken = chosen & (torch.rand(chosen.shape) < share)
            states_there = last[taken].float()
            normed = F.rms_norm(states_there, last.shape[-1:], self.model_norm, self.config["rms_norm_eps"])
            yield _product(self.norm(output[taken], "norm"), self.head), normed

    def save(self, folder: Path) -> None:
        """Write it as EAGLE-3's authors publish theirs."""
        tensors = {
            name if name.startswith(("fc.", "norm.")) else f"midlayer.{name}": weight.detach().bfloat16().contiguous()
            for name, weight in self.weights.items()
        }
        vocab_size = len(self.embedding)
        tensors["lm_head.weight"] = self.head.bfloat16()
        tensors["d2t"] = self.token_ids - torch.arange(len(self.token_ids))
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), self.token_ids)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / SAFETENSORS)
        facts = {"num_hidden_layers": 1, "draft_vocab_size": len(self.token_ids)}
        (folder / "config.json").write_text(json.dumps(self.config | facts), encoding="utf-8")


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16()).float()


def _shift(x: Tensor, num_tokens: int) -> Tensor:
    """Return x [..., tokens, size] with its tokens so many places later, and zeros before them."""
    return F.pad(x, (0, 0, num_tokens, 0))[..., : x.shape[-2], :]


def train(layer: Layer, examples: Sequence[Example], *, num_passes: int, num_depths: int) -> Iterator[float]:
    """Learn, a batch at a time; yields the share of each that is done."""
    matrices = [weight for weight in layer.weights.values() if weight.ndim > 1]
    norms = [weight for weight in layer.weights.values() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.5e-3, betas=(0.9, 0.95))
    total = num_passes * (len(examples) // BATCH_ANSWERS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.5e-3, total_steps=total + 1, pct_start=0.1)
    order = chain.from_iterable(torch.randperm(len(examples)).tolist() for _ in range(num_passes + 1))
    for number in range(total):
        chosen = [examples[i] for i in islice(order, BATCH_ANSWERS)]
        losses = [
            DEPTH_WEIGHT**depth * F.cross_entropy(found, _product(normed, layer.head).softmax(-1))
            for depth, (found, normed) in enumerate(layer.looks(chosen, num_depths, SHARE))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*matrices, *norms], 1.0)
        optimizer.step()
        schedule.step()
        yield (number + 1) / total


@torch.no_grad()
def hit_rates(layer: Layer, examples: Sequence[Example]) -> list[float]:
    """Return how often the likeliest token is the model's, by its place in the draft, where those before it are right.

    The model's choice counts among all its tokens: one that the layer cannot draft is a miss.
    """
    num_right, num_all = torch.zeros(NUM_JUDGED), torch.zeros(NUM_JUDGED)
    for begin in range(0, len(examples), BATCH_ANSWERS):
        part = examples[begin : begin + BATCH_ANSWERS]
        for depth, (found, normed) in enumerate(layer.looks(part, NUM_JUDGED, 1.0)):
            wanted = _product(normed, layer.embedding).argmax(-1)
            num_right[depth] += float((layer.token_ids[found.argmax(-1)] == wanted).sum())
            num_all[depth] += len(found)
    return (num_right / num_all).tolist()


def main() -> None:
    """Train, judge and write."""
    parser = command_line("eagle", __doc__, rounds=1)
    parser.add_argument("folder", type=Path, help="where the layer is written")
    parser.add_argument("--answers", type=int, default=1600, help="answers to learn from (default: 1600)")
    parser.add_argument("--passes", type=int, default=2, help="times that each is seen (default: 2)")
    parser.add_argument("--depths", type=int, default=2, help="depths of drafts that are learnt (default: 2)")
    parser.add_argument("--vocab", type=int, default=6144, help="tokens that it drafts (default: 6144)")
    args = parser.parse_args()
    console, began_s, began_cpu_s = terminal(), time.perf_counter(), time.process_time()
    torch.manual_seed(0)
    engine = load("off", BATCH)
    assert isinstance(engine.executor, ModelExecutor)
    template = load_chat_template(resolve_model("default", local_files_only=False))
    assert template is not None, "the default model has a chat template"
    prompts = [prompt_ids(engine, template, text) for text in questions(args.answers)]
    answers = [answer for batch in answer_batches(engine, prompts) for answer in batch]

    def told(what: str) -> None:
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        console.print(f"{what} after {wall_s:.0f} s, {cpu_s:.0f} s of CPU time")

    told(f"{sum(map(len, answers))} tokens of answers")
    examples = list(read_examples(engine.executor, list(zip(prompts, answers, strict=True))))
    told("states")
    learnt, judged = examples[: len(examples) * 9 // 10], examples[len(examples) * 9 // 10 :]
    weights = {name: each.float() for name, each in load_file(default_model_dir() / SAFETENSORS).items()}
    config = json.loads((default_model_dir() / "config.json").read_text(encoding="utf-8"))
    counts = torch.bincount(torch.cat([each.token_ids for each in learnt]), minlength=config["vocab_size"])
    layer = Layer(weights, config, counts.topk(args.vocab).indices.sort().values)
    for done in train(layer, learnt, num_passes=args.passes, num_depths=args.depths):
        if round(done * 1000) % 100 == 0:
            told(f"{done:.0%} of training")
    layer.save(args.folder)
    told("right with " + ", ".join(f"{rate:.0%}" for rate in hit_rates(layer, judged)) + " of others")


if __name__ == "__main__":
    main()
