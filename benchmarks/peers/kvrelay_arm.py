"""kvrelay's engine behind the benchmark's pipe: what a worker computes, without the network around it.

Scheduler, block pool, prefix cache, executor, sampler and detokenizing are the workers'; the difference is that this
process steps the core itself (`worker.inprocess.LocalEngine`) where a worker has a thread for it.
"""

import argparse
import logging
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.protocol import Prompts, claim_stdout, serve


class LoadRecord(logging.Handler):
    """Keeps what the engine logs of itself while it loads: kernels, threads, pages."""

    _FIELDS = ("operations", "linears", "torch_threads", "dtype", "block_size", "num_blocks", "kv_bytes_per_token")

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take the fields that a reader of the results wants to know."""
        self.fields |= {name: getattr(record, name) for name in self._FIELDS if hasattr(record, name)}


def main() -> None:
    """Load the model as a decode worker does and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--kv-memory-gib", type=float, required=True)
    parser.add_argument("--max-step-tokens", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-dtype", default="auto")
    args = parser.parse_args()
    replies = claim_stdout()

    import torch

    from common.config import parse_config
    from common.log import setup_logging
    from common.sampling import SamplingParams
    from worker.inprocess import LocalEngine

    setup_logging("kvrelay-arm")
    load_record = LoadRecord()
    logging.getLogger().addHandler(load_record)
    model = {
        "id": args.model,
        "dtype": args.dtype,
        "device": "cpu",
        "max_model_len": args.max_model_len,
        "quantization": args.quantization,
        "kv_dtype": args.kv_dtype,
    }
    pools = {"decode": {"kv_memory_gib": args.kv_memory_gib, "max_step_tokens": args.max_step_tokens}}
    config = parse_config({"model": model, "pools": pools}, source="benchmark")
    engine = LocalEngine.load(config)

    def generate(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for token in engine.stream_all([(prompt, sampling) for prompt in prompts]):
            yield token.request_idx, token.token_id

    logging.getLogger().removeHandler(load_record)
    about = {"torch": torch.__version__, "max_step_tokens": args.max_step_tokens}
    serve(replies, generate, about | load_record.fields)


if __name__ == "__main__":
    main()
