"""The real default model against transformers, token for token."""

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from common.model_files import default_model_dir, is_checkpoint
from tests.engine.tiny_models import Driver, load, make_sequence, reference_tokens

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_checkpoint(default_model_dir()), reason="run `kvrelay fetch-model` once"),
]

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "The three laws of thermodynamics say that",
    "def fibonacci(n: int) -> int:\n    " + "# Returns the n-th number of the sequence.\n    " * 12,
)


def test_execute_when_default_model_is_greedy_in_float32_equals_transformers() -> None:
    model_dir = default_model_dir()
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = [reference_tokens(reference, prompt, 24) for prompt in prompts]
    del reference

    driver = Driver(load(model_dir, block_size=16, num_blocks=64))
    sequences = [make_sequence(prompt, block_size=16) for prompt in prompts]
    assert driver.generate(sequences, num_tokens=24, chunk_size=50) == expected
    assert tokenizer.decode(expected[0]).startswith("The capital of France is Paris.")
