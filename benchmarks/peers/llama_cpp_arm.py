"""llama.cpp behind the benchmark's pipe, through its C interface. Runs under the interpreter of its own venv."""

import argparse
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Prompts, claim_stdout, serve

_MICRO_BATCH = 512  # llama.cpp's default
_BF16, _Q8_0 = 30, 8  # of `enum ggml_type`


class Llama:
    """A model and its context: reads prompts, then decodes all sequences together."""

    def __init__(self, library: Any, path: Path, *, max_tokens: int, max_seqs: int, threads: int) -> None:
        """Load a GGUF. Raises RuntimeError when llama.cpp does not take it."""
        self._library = library
        model_options = library.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(path).encode(), model_options)
        options = library.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = max_tokens, max_tokens, _MICRO_BATCH
        options.n_seq_max, options.kv_unified = max_seqs, True
        options.n_threads = options.n_threads_batch = threads
        self._context = self._model and library.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(max_tokens, 0, 1)

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (index of the prompt, token id), greedily, ignoring end-of-text."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)  # noqa: FBT003 - of C
        rows = [
            (token_id, position, index, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        for step in range(max_tokens):
            found = self._decode(rows)
            yield from enumerate(found)
            rows = [
                (token_id, len(prompt) + step, index, True)
                for index, (prompt, token_id) in enumerate(zip(prompts, found, strict=True))
            ]

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, whether its logits are due); return the most likely next tokens."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token_id, position, index, is_due) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, is_due
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, index
        if status := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        due = [i for i, row in enumerate(rows) if row[3]]
        logits = (self._library.llama_get_logits_ith(self._context, i) for i in due)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in logits]


def convert(library: Any, source: Path, target: Path, weights: str) -> None:
    """Write a GGUF in another format, with embedding and head in 8 bits unless all is bfloat16."""
    options = library.llama_model_quantize_default_params()
    options.allow_requantize = True
    options.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{weights.upper()}")
    options.output_tensor_type = options.token_embedding_type = _BF16 if weights == "bf16" else _Q8_0
    partial = target.with_suffix(".partial")
    if library.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp cannot convert {source} to {weights}")
    partial.replace(target)


def main() -> None:
    """Convert the model, load it and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf", type=Path, required=True, help="the model in any format")
    parser.add_argument("--weights", required=True, help="bf16, q8_0 or q4_0")
    parser.add_argument("--max-tokens", type=int, required=True, help="of all sequences together")
    parser.add_argument("--max-seqs", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    replies = claim_stdout()

    import llama_cpp  # type: ignore[import-not-found]  # only the peer's own venv has it

    llama_cpp.llama_backend_init()
    path = args.gguf.with_suffix(f".{args.weights}.gguf")
    if not path.exists():
        convert(llama_cpp, args.gguf, path, args.weights)
    llama = Llama(llama_cpp, path, max_tokens=args.max_tokens, max_seqs=args.max_seqs, threads=args.threads)
    serve(
        replies,
        llama.generate,
        {
            "version": llama_cpp.__version__,
            "weights": args.weights,
            "threads": args.threads,
            "features": llama_cpp.llama_print_system_info().decode().strip(),
        },
    )


if __name__ == "__main__":
    main()
