"""lm-evaluation-harness against `/v1/completions`: a small task of its own file, judged by log-probabilities."""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
import requests
from lm_eval.tasks import TaskManager


def main() -> None:
    """Evaluate the task in the folder and print what each continuation got.

    Arguments: address of the API, folder of the model's tokenizer, folder of the task, its name.
    """
    base_url, tokenizer, folder, task = sys.argv[1:]
    options: dict[str, Any] = {
        "base_url": f"{base_url}/completions",
        "model": requests.get(f"{base_url}/models", timeout=60).json()["data"][0]["id"],
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=options,
        tasks=[task],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        batch_size=4,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = results["samples"][task]
    told = [
        {"asked": list(sample["arguments"]), "answers": [each for (each,) in sample["resps"]]} for sample in samples
    ]
    found = {"metrics": results["results"][task], "samples": told}
    print(json.dumps(found, default=str))  # noqa: T201


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    main()
