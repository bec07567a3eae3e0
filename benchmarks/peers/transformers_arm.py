"""Plain `transformers` behind the benchmark's pipe: generate() on one static batch, prompts of equal length."""

import argparse
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

from benchmarks.peers.protocol import Prompts, claim_stdout, serve


def main() -> None:
    """Load the model with transformers and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    replies = claim_stdout()

    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    model.eval()

    class Tap:
        """Streamer that generate() calls with each step's tokens; the first call brings the prompts."""

        def __init__(self) -> None:
            self.steps: SimpleQueue[list[int] | BaseException | None] = SimpleQueue()
            self._has_prompt = False

        def put(self, token_ids: torch.Tensor) -> None:
            """Take one token of each sequence."""
            if self._has_prompt:
                self.steps.put(token_ids.tolist())
            self._has_prompt = True

        def end(self) -> None:
            """Nothing follows."""

    def run(tap: Tap, prompts: Prompts, max_tokens: int) -> None:
        try:
            input_ids = torch.tensor(prompts)
            with torch.inference_mode():
                model.generate(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens,
                    streamer=tap,
                )
        except Exception as error:  # noqa: BLE001 - the top of a thread: raised again where the tokens are read
            tap.steps.put(error)
        else:
            tap.steps.put(None)

    def generate(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        tap = Tap()
        thread = Thread(target=run, args=(tap, prompts, max_tokens))
        thread.start()
        while (step := tap.steps.get()) is not None:
            if isinstance(step, BaseException):
                thread.join()
                raise step
            yield from enumerate(step)
        thread.join()

    threads = torch.get_num_threads()
    about = {"version": transformers.__version__, "torch": torch.__version__, "dtype": args.dtype, "threads": threads}
    serve(replies, generate, about)


if __name__ == "__main__":
    main()
