"""Answers of one engine of ours over vLLM's runner: `python -m tests.vllm.answer` reads and prints JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from engine.loading import load_executor
from tests.vllm.test_engine import answers_of, core_of, options


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    executor = load_executor(options(Path(asked["model"]), dtype=asked["dtype"]))
    core = core_of(executor, max_step_tokens=50)
    json.dump(answers_of(core, asked["prompts"], max_tokens=asked["max_tokens"]), sys.stdout)


if __name__ == "__main__":
    main()
