"""CPU time of one thread for a forward pass, by weights' format and number of tokens; another checkout beside it.

    python -m benchmarks.forward_pass [--model default] [--formats bfloat16 int8 int4] [--beside FOLDER] [--rounds 11]

Method. Each arm is a process with one thread, which loads the model in one format as a worker does (weights in few bits
have activations in bfloat16; format `transformers`: its modules compute in bfloat16, on our pages, or, `alone`, with
its own cache, for models whose pages it cannot write): forward pass and output head (of the last token of each
sequence), pages included, without sampling or scheduling. `decode N`: one token of each of N sequences behind 32 tokens
of context; `prefill N`: N tokens of one prompt. The arms take turns within each round, so that they meet the same
machine; reported are medians of the thread's CPU time with their range, and ratios between arms within a round.
The first round is dropped.
"""

import copy
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

CASES = {
    **{f"decode {count}": {"num_seqs": count, "num_tokens": 1, "context": 32} for count in (1, 8, 32)},
    **{
        f"decode {count} at {context}": {"num_seqs": count, "num_tokens": 1, "context": context}
        for count, context in ((16, 500), (1, 8000))
    },
    **{f"prefill {count}": {"num_seqs": 1, "num_tokens": count, "context": 0} for count in (64, 512, 1024, 8192)},
}
REPEATS = {"decode 1": 5, "decode 8": 5, "decode 32": 3, "prefill 64": 3, "prefill 512": 2, "prefill 1024": 2}
BLOCK_SIZE, NUM_BLOCKS = 16, 520
_HERE = Path(__file__).resolve().parent.parent


def serve(model: str, weights_format: str) -> None:
    """Answer each case on standard input with its CPU milliseconds on standard output, a line each."""
    import torch

    from common.model_files import resolve_model

    torch.set_num_threads(1)
    model_dir = resolve_model(model, local_files_only=True)
    cpu_ms = _alone(model_dir) if weights_format == "alone" else _on_pages(model_dir, weights_format)
    with torch.inference_mode():
        for line in sys.stdin:
            case = json.loads(line)
            print(min(cpu_ms(**case["sizes"]) for _ in range(case["repeats"])), flush=True)


def _alone(model_dir: Path) -> Callable[..., float]:
    """Return a function of a case's sizes that times transformers with its own cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]

    @functools.cache
    def filled(num_seqs: int, context: int) -> Any:
        cache = DynamicCache(config=model.config)
        if context:
            model(input_ids=torch.zeros((num_seqs, context), dtype=torch.int64), past_key_values=cache)
        return cache

    def cpu_ms(num_seqs: int, num_tokens: int, context: int) -> float:
        cache = copy.deepcopy(filled(num_seqs, context))  # the call appends to it
        token_ids = torch.arange(num_seqs * num_tokens).view(num_seqs, -1) % model.config.vocab_size
        started_s = time.thread_time()
        model(input_ids=token_ids, past_key_values=cache, logits_to_keep=1)
        return (time.thread_time() - started_s) * 1e3

    return cpu_ms


def _on_pages(model_dir: Path, weights_format: str) -> Callable[..., float]:
    """Return a function of a case's sizes that times an engine's forward pass."""
    import torch

    from common.ids import BlockId
    from engine.ops.metadata import AttentionMetadata, SequenceSpan
    from engine.weights.config import read_json

    load = _load_foreign if weights_format == "transformers" else _load_native
    decoder, ops, store = load(model_dir, weights_format)
    vocab_size = read_json(model_dir / "config.json")["vocab_size"]
    for part in (part for layer in store.layers for part in layer):
        part.normal_()

    def cpu_ms(num_seqs: int, num_tokens: int, context: int) -> float:
        num_blocks = -(-(context + num_tokens) // BLOCK_SIZE)
        spans = [
            SequenceSpan(
                num_computed=context,
                num_new_tokens=num_tokens,
                block_table=[BlockId(i) for i in range(seq * num_blocks, (seq + 1) * num_blocks)],
            )
            for seq in range(num_seqs)
        ]
        token_ids = torch.arange(num_seqs * num_tokens) % vocab_size
        started_s = time.thread_time()
        step = ops.plan(AttentionMetadata.from_spans(spans, block_size=BLOCK_SIZE))
        hidden = decoder.forward(token_ids, step)
        decoder.logits(hidden[num_tokens - 1 :: num_tokens].contiguous())
        return (time.thread_time() - started_s) * 1e3

    return cpu_ms


def _load_native(model_dir: Path, weights_format: str) -> Any:
    """Return our decoder, its operations and its pages."""
    import torch

    from engine.model.decoder import Decoder
    from engine.model.loader import load_weights, weight_files
    from engine.ops.cpu.linear import DepthParts
    from engine.ops.cpu.ops import CpuDecoder, CpuOps, can_run
    from engine.ops.select import choose_cpu_kernels, load_cpu_kernels
    from engine.weights.config import parse_config, read_json
    from engine.weights.quantize import quantize_weights
    from engine.weights.segments import num_segments

    config = parse_config(read_json(model_dir / "config.json"))
    dtype = torch.float32 if weights_format == "float32" else torch.bfloat16
    weights = load_weights(weight_files(model_dir), config, dtype=dtype, device=torch.device("cpu"))
    if weights_format in ("int8", "int4"):
        quantize_weights(weights, config, weights_format)  # type: ignore[arg-type] # of an arm
    depth = DepthParts(num_segments=num_segments(config))
    choice = choose_cpu_kernels(weights, load_cpu_kernels(dtype), depth)
    store = _make_store(config, dtype)
    ops = choice.bind(config, store)
    if isinstance(ops, CpuOps) and can_run(weights):
        return CpuDecoder(config, weights, ops.kernels), ops, store
    return Decoder(config, weights), ops, store


def _load_foreign(model_dir: Path, _weights_format: str) -> Any:
    """Return transformers' decoder, its operations and its pages."""
    import torch

    from engine.model.transformers_decoder import TransformersOps
    from engine.model.transformers_loader import load_transformers_decoder
    from engine.model.transformers_trial import read_transformers_config

    dtype = torch.bfloat16
    config = read_transformers_config(model_dir, dtype=dtype)
    decoder = load_transformers_decoder(model_dir, config, dtype=dtype, device=torch.device("cpu"))
    store = _make_store(config, dtype)
    return decoder, TransformersOps(config, store), store


def _make_store(config: Any, dtype: Any) -> Any:
    import torch

    from engine.pages.kv_cache import TorchKvStore, kv_shape

    shape = kv_shape(config, block_size=BLOCK_SIZE, dtype=dtype, fingerprint="")
    return TorchKvStore(shape, NUM_BLOCKS, device=torch.device("cpu"))


@contextmanager
def arm(checkout: Path, model: str, weights_format: str) -> Iterator["subprocess.Popen[str]"]:
    """Run an arm's process with the sources of a checkout."""
    command = [sys.executable, "-P", __file__, "--serve", model, weights_format]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: "subprocess.Popen[str]", case: str) -> float:
    """Return an arm's CPU milliseconds for a case."""
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps({"sizes": CASES[case], "repeats": REPEATS.get(case, 1)}), file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    """Run and report."""
    from benchmarks.command import command_line, terminal, write_figures
    from benchmarks.figures import Figures

    parser = command_line("forward_pass", __doc__, rounds=11)
    parser.add_argument("--model", default="default", help="checkpoint folder or hub id")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["bfloat16", "int8", "int4"],
        help="default: these; also float32, transformers, alone",
    )
    parser.add_argument("--beside", type=Path, help="another checkout of kvrelay, measured in the same rounds")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="default: all")
    args = parser.parse_args()
    figures, console = Figures(), terminal()
    checkouts = {"": _HERE} if args.beside is None else {"": _HERE, f" of {args.beside.name}": args.beside.resolve()}
    with ExitStack() as stack:
        arms = {
            weights_format + suffix: stack.enter_context(arm(checkout, args.model, weights_format))
            for weights_format in args.formats
            for suffix, checkout in checkouts.items()
        }
        for round_idx in range(-1, args.rounds):
            for case in args.cases:
                for name, process in arms.items():
                    found_ms = ask(process, case)
                    if round_idx >= 0:
                        figures.add("forward pass", case, name, CPU_ms=found_ms)
    figures.show(console, base=args.formats[0])
    write_figures(args.json, figures, method="benchmarks/forward_pass.py", model=args.model)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
