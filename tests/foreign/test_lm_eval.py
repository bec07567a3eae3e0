"""lm-evaluation-harness measures a served model as it measures the same model in its own process."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.lifecycle import read_info
from common.model_files import default_model_dir
from tests.e2e.harness import running_cluster, until_idle
from tests.e2e.test_oracle import model_config
from tests.foreign.subprocesses import python_with, run_python

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

NEEDS = ("lm_eval", "transformers")
TASK: dict[str, Any] = {
    "task": "kvrelay_facts",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
DOCS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris.", "a kind of bread.", "7"], "answer": 0},
    {"question": "Two and two make", "choices": ["five.", "four."], "answer": 1},
    {"question": "Ice melts at zero degrees", "choices": ["Celsius.", "of freedom, as everyone knows."], "answer": 0},
]
TOLERANCE = 1e-3
"""Difference that orders of float32 additions make in the sum over a continuation's tokens."""


def write_task(folder: Path) -> None:
    """Write the task and its documents."""
    docs = folder / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), encoding="utf-8")
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(docs)}}}
    (folder / "task.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


class Judge:
    """Plain `transformers`: log-probabilities of continuations."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)

    def judge(self, context: str, continuation: str) -> tuple[float, bool]:
        """Return the continuation's log-probability, and whether each of its tokens is the most probable one."""
        num_given = len(self._tokenizer(context).input_ids)
        token_ids = self._torch.tensor(self._tokenizer(context + continuation).input_ids)
        with self._torch.inference_mode():
            logits = self._model(token_ids[None]).logits[0, num_given - 1 : -1]
        wanted = token_ids[num_given:]
        found = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum()
        return float(found), bool((logits.argmax(-1) == wanted).all())


async def test_log_likelihoods_of_a_task_are_those_of_transformers(tmp_path: Path) -> None:
    await python_with(*NEEDS)
    task_dir = tmp_path / "task"
    task_dir.mkdir()
    write_task(task_dir)
    model_dir = default_model_dir()
    async with running_cluster(tmp_path, model_config(model_dir), timeout_s=300) as grpc:
        info = read_info(tmp_path / "run")
        assert info is not None
        found = await run_python(
            "lm_eval_sdk.py",
            *(f"http://{info.http_address}/v1", str(model_dir), str(task_dir), TASK["task"]),
            needs=NEEDS,
        )
        await until_idle(grpc)
    judge = Judge(model_dir)
    answered = [
        (argument, tuple(answer))
        for sample in found["samples"]
        for argument, answer in zip(sample["asked"], sample["answers"], strict=True)
    ]
    assert len(answered) == sum(len(doc["choices"]) for doc in DOCS)
    for (context, continuation), (logprob, is_greedy) in answered:
        expected, is_most_probable = judge.judge(context, continuation)
        assert logprob == pytest.approx(expected, abs=TOLERANCE), (context, continuation)
        assert is_greedy == is_most_probable, (context, continuation)
