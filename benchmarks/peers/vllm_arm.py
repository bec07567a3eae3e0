"""vLLM behind the benchmark's pipe. Runs under the interpreter of vLLM's own venv."""

import argparse
from collections.abc import Iterator
from itertools import count
from typing import Any

from benchmarks.peers.protocol import Prompts, claim_stdout, serve


def main() -> None:
    """Load the model with vLLM's offline engine and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    args = parser.parse_args()
    replies = claim_stdout()

    import torch
    import vllm  # only the peer's own venv has it
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )
    request_ids = count()

    def generate(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        index_of: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            request_id = str(next(request_ids))
            index_of[request_id] = index
            engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                for token_id in output.outputs[0].token_ids:
                    yield index_of[output.request_id], token_id

    config: Any = engine.vllm_config
    serve(
        replies,
        generate,
        {
            "version": vllm.__version__,
            "torch": torch.__version__,
            "dtype": args.dtype,
            "threads": torch.get_num_threads(),
            "max_step_tokens": config.scheduler_config.max_num_batched_tokens,
            "compilation": str(config.compilation_config.mode),
            "block_size": config.cache_config.block_size,
        },
    )


if __name__ == "__main__":
    main()
