"""Quality lost to weights and to KV pages in 8 and 4 bits: perplexity and greedy agreement beside bfloat16.

    python -m benchmarks.quality [--model default] [--on-grid] [--windows 24] [--arms NAME ...] [--json FILE]

Method. The text is the Python language reference as the interpreter carries it (`pydoc_data.topics`, sorted by name),
cut into windows of 512 tokens, evenly spaced; its SHA-256 is kept with the result. Each arm reads each window at once,
through the paged cache, with torch's attention on the CPU and the projections that a CPU worker has:

    bfloat16          the model as it is served; the reference of the others
    float32           the same weights computed without rounding: how far bfloat16 itself is from them
    fp8               weights and activations of all layers in e4m3
    int8 / int4       weights of all layers in 8 or 4 bits, of the head in 8; activations in 8
    int4 checkpoint   weights of all layers in 4 bits, as `kvrelay quantize` rounds them: nearest, or for a text
    fp8 KV            keys and values rounded to e4m3 on their way into the pages, with the scales that are served
    int8 KV, int4 KV  keys and values in pages of codes, as they are served on CPUs (`engine/pages/kv_format.py`)

The default checkpoint is a dequantized GGUF: its weights lie on grids of 16 values already, which a 4-bit format may
hit. Unless --on-grid is given, the inputs of each projection are therefore first scaled at random, by a log-normal
factor for each channel, and the norm, values or gate before them in reverse: the same function of weights that lie on
no grid. All arms read these weights.

Perplexity is exp of the mean negative log-likelihood of every token but a window's first. KL is the mean divergence of
an arm's next-token distribution from the reference's. For greedy agreement the reference writes 48 tokens behind the
first 64 of each window, and each arm reads prompt and answer: where its most likely token is the reference's at every
position up to i, it would have written the same i tokens by itself. Reported: the share of all positions that agree,
and the mean number of tokens until the first that does not.
"""

import hashlib
import math
import pydoc_data.topics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from benchmarks.quality_weights import leave_grid, quantized
from common.ids import BlockId
from common.model_files import resolve_model
from engine.model.decoder import Decoder
from engine.model.loader import load_weights, weight_files
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.select import choose_cpu_kernels, load_cpu_kernels
from engine.ops.torch_attention import StepAttention
from engine.ops.torch_ops import TorchOps, TorchStepOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.pages.kv_format import KvDtype
from engine.weights.config import DecoderConfig, parse_config, read_json
from engine.weights.quantize import QuantizationMethod, kv_scales, quantize_weights, round_to_fp8

WINDOW_TOKENS = 512
PROMPT_TOKENS = 64
ANSWER_TOKENS = 48
BLOCK_SIZE = 16
REFERENCE = "bfloat16"
_CPU = torch.device("cpu")
_LOGIT_ROWS = 64  # float32 logits of so many positions at a time bound the memory


@dataclass(slots=True)
class Arm:
    """One way to compute the model, and what was measured of it."""

    name: str
    predict: "Predictor"
    nll_sum: float = 0.0
    kl_sum: float = 0.0
    num_predicted: int = 0
    num_same_top: int = 0
    agreements: list[list[bool]] = field(default_factory=list)
    """Agreement with the reference's most likely token, by window and position of the answer."""

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        return math.exp(self.nll_sum / self.num_predicted)

    def summary(self) -> dict[str, float]:
        """Return the figures of the table."""
        positions = [same for window in self.agreements for same in window]
        runs = [window.index(False) if False in window else len(window) for window in self.agreements]
        return {
            "perplexity": self.perplexity,
            "KL": self.kl_sum / self.num_predicted,
            "same_top_token": self.num_same_top / self.num_predicted,
            "greedy_agreement": sum(positions) / len(positions),
            f"tokens_until_difference,_of_{ANSWER_TOKENS}": sum(runs) / len(runs),
            "same_answers": sum(run == ANSWER_TOKENS for run in runs) / len(runs),
        }


class Predictor:
    """A decoder with pages for one window."""

    def __init__(self, decoder: Decoder, ops: TorchOps) -> None:
        self._decoder = decoder
        self._ops = ops

    def hidden(self, token_ids: Sequence[int], *, num_computed: int = 0) -> Tensor:
        """Return the final hidden states of token_ids[num_computed:], whose predecessors are in the pages."""
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        span = SequenceSpan(
            num_computed=num_computed,
            num_new_tokens=len(token_ids) - num_computed,
            block_table=[BlockId(i) for i in range(num_blocks)],
        )
        metadata = AttentionMetadata.from_spans([span], block_size=BLOCK_SIZE)
        return self._decoder.forward(torch.tensor(token_ids[num_computed:]), self._ops.plan(metadata))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size]."""
        return self._decoder.logits(hidden)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the most likely continuation, token by token."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            num_computed = len(tokens) - 1 if len(tokens) > len(prompt) else 0
            last = self.hidden(tokens, num_computed=num_computed)[-1:]
            tokens.append(int(self.logits(last).argmax()))
        return tokens[len(prompt) :]


class RoundedKvOps(TorchOps):
    """Operations whose pages hold what e4m3 pages would: bfloat16 represents each of their values."""

    def __init__(self, config: DecoderConfig, store: TorchKvStore, scales: Sequence[tuple[float, float]]) -> None:
        super().__init__(config, store)
        self._scales = scales

    def plan(self, metadata: AttentionMetadata) -> TorchStepOps:
        """See `TorchOps`."""
        attention = RoundedKvAttention(self._attention.plan(metadata), self._scales)
        return TorchStepOps(self._config, attention, self._rotations(metadata))


class RoundedKvAttention:
    """Rounds keys and values before they are stored or read; a `StepAttention`."""

    def __init__(self, attention: StepAttention, scales: Sequence[tuple[float, float]]) -> None:
        self._attention = attention
        self._scales = scales

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `StepAttention`."""
        key_scale, value_scale = self._scales[layer_idx]
        key, value = round_to_fp8(key, key_scale), round_to_fp8(value, value_scale)
        return self._attention.attend(layer_idx, query, key, value, sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make an arm."""

    method: QuantizationMethod | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: KvDtype = "auto"
    checkpoint_for: int | None = None
    """Tokens to calibrate a checkpoint in 4 bits with; 0: the nearest weights, None: the plain checkpoint."""


def recipes(calibration_tokens: int) -> dict[str, Recipe]:
    """Return all arms by name, the reference first."""
    return {
        REFERENCE: Recipe(),
        "float32": Recipe(dtype=torch.float32),
        "fp8": Recipe(method="fp8"),
        "int8": Recipe(method="int8"),
        "int4": Recipe(method="int4"),
        "int4 checkpoint, nearest": Recipe(checkpoint_for=0),
        "int4 checkpoint, calibrated": Recipe(checkpoint_for=calibration_tokens),
        "fp8 KV": Recipe(kv_dtype="fp8"),
        "fp8 + fp8 KV": Recipe(method="fp8", kv_dtype="fp8"),
        "int8 + fp8 KV": Recipe(method="int8", kv_dtype="fp8"),
        "int8 KV": Recipe(kv_dtype="int8"),
        "int4 KV": Recipe(kv_dtype="int4"),
        "int4 + int8 KV": Recipe(method="int4", kv_dtype="int8"),
    }


def make_arm(name: str, recipe: Recipe, model_dir: Path, *, is_on_grid: bool) -> Arm:
    """Load the model for an arm."""
    config = parse_config(read_json(model_dir / "config.json"))
    weights = load_weights(weight_files(model_dir), config, dtype=recipe.dtype, device=_CPU)
    if not is_on_grid:
        leave_grid(weights, config)
    scales = kv_scales(weights, config) if recipe.kv_dtype == "fp8" else None
    if recipe.checkpoint_for is not None:
        weights = quantized(weights, config, model_dir, calibration_tokens=recipe.checkpoint_for)
    if recipe.method is not None:
        quantize_weights(weights, config, recipe.method)
    choose_cpu_kernels(weights, load_cpu_kernels(recipe.dtype))
    # Pages of e4m3 are emulated, the others are real.
    pages: KvDtype = "auto" if recipe.kv_dtype == "fp8" else recipe.kv_dtype
    shape = kv_shape(config, block_size=BLOCK_SIZE, dtype=recipe.dtype, kv_dtype=pages, fingerprint=name)
    store = TorchKvStore(shape, WINDOW_TOKENS // BLOCK_SIZE, device=_CPU)
    ops = TorchOps(config, store, recipe.dtype) if scales is None else RoundedKvOps(config, store, scales)
    return Arm(name=name, predict=Predictor(Decoder(config, weights), ops))


def measure(arms: Sequence[Arm], windows: Sequence[Sequence[int]], on_step: Callable[[], None]) -> None:
    """Let every arm read every window; fills in the arms."""
    reference = arms[0]
    for window in windows:
        hidden = {arm.name: arm.predict.hidden(window) for arm in arms}
        for first in range(0, len(window) - 1, _LOGIT_ROWS):
            rows = slice(first, min(first + _LOGIT_ROWS, len(window) - 1))
            targets = torch.tensor(window[rows.start + 1 : rows.stop + 1])
            expected = reference.predict.logits(hidden[reference.name][rows]).log_softmax(-1)
            for arm in arms:
                found = arm.predict.logits(hidden[arm.name][rows]).log_softmax(-1) if arm is not reference else expected
                arm.nll_sum -= float(found.gather(1, targets[:, None]).double().sum())
                arm.kl_sum += float((expected.exp() * (expected - found)).sum(-1).double().sum())
                arm.num_same_top += int((found.argmax(-1) == expected.argmax(-1)).sum())
                arm.num_predicted += len(targets)
        prompt = list(window[:PROMPT_TOKENS])
        answer = reference.predict.generate(prompt, ANSWER_TOKENS)
        for arm in arms:
            states = arm.predict.hidden([*prompt, *answer])[PROMPT_TOKENS - 1 : -1]
            arm.agreements.append((arm.predict.logits(states).argmax(-1) == torch.tensor(answer)).tolist())
        on_step()


def read_windows(model_dir: Path, num_windows: int) -> tuple[list[list[int]], str]:
    """Return token windows of the text and the text's SHA-256."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    stride = (len(token_ids) - WINDOW_TOKENS) // max(1, num_windows - 1)
    if stride < WINDOW_TOKENS:
        raise SystemExit(f"the text has {len(token_ids)} tokens: too few for {num_windows} windows")
    windows = [token_ids[i * stride : i * stride + WINDOW_TOKENS] for i in range(num_windows)]
    return windows, hashlib.sha256(text.encode()).hexdigest()


@torch.inference_mode()
def main() -> None:
    """Run and report."""
    parser = command_line("quality", __doc__)
    parser.add_argument("--model", default="default", help="checkpoint folder or hub id")
    parser.add_argument("--windows", type=int, default=24, help="windows of 512 tokens")
    parser.add_argument("--on-grid", action="store_true", help="take the weights as the checkpoint has them")
    parser.add_argument("--arms", nargs="+", help="arms beside the reference; default: all")
    parser.add_argument("--calibration-tokens", type=int, default=32_768, help="tokens of the calibrated checkpoint")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    started_s = time.monotonic()
    model_dir = resolve_model(args.model, local_files_only=True)
    windows, digest = read_windows(model_dir, args.windows)
    arms = [
        make_arm(name, recipe, model_dir, is_on_grid=args.on_grid)
        for name, recipe in recipes(args.calibration_tokens).items()
        if args.arms is None or name in (REFERENCE, *args.arms)
    ]
    with Progress(console=console) as progress:
        task = progress.add_task("windows", total=len(windows))
        measure(arms, windows, lambda: progress.advance(task))
    for arm in arms:
        ratio = arm.perplexity / arms[0].perplexity
        figures.add("quality", model_dir.name, arm.name, **arm.summary(), perplexity_ratio=ratio)
    console.print(f"{arms[0].num_predicted} predicted tokens")
    figures.show(console)
    write_figures(
        args.json,
        figures,
        method="benchmarks/quality.py",
        torch=torch.__version__,
        text_sha256=digest,
        num_windows=len(windows),
        window_tokens=WINDOW_TOKENS,
        calibration_tokens=args.calibration_tokens,
        elapsed_s=time.monotonic() - started_s,
    )


if __name__ == "__main__":
    main()
