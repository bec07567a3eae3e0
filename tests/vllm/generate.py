"""Answers of vLLM's own `LLM.generate`, in a process of its own: `python -m tests.vllm.generate` reads and prints JSON.

A test's process has an engine of ours, and vLLM takes one per process.
"""

import json
import os
import sys
from typing import Any

from engine.vllm.loading import ENVIRONMENT


def main() -> None:
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.load(sys.stdin)
    llm = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        max_model_len=512,
        block_size=32,
        enforce_eager=True,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], params, use_tqdm=False)
    json.dump([list(answer.outputs[0].token_ids) for answer in answers], sys.stdout)


if __name__ == "__main__":
    main()
