"""Answers of vLLM's own `LLM.generate`, in a process of its own: `python -m tests.vllm.generate` reads and prints JSON.

It reads a list of jobs, {model, dtype, prompts, max_tokens}, and prints a list of their answers.
"""

import json
import os
import sys
from typing import Any

from engine.vllm.environment import ENVIRONMENT


def main() -> None:
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    json.dump([_answers(job) for job in json.load(sys.stdin)], sys.stdout)


def _answers(job: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=512,
        block_size=32,
        enforce_eager=True,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


if __name__ == "__main__":
    main()
