"""Draft heads: what they read from checkpoints, and that answers are those without them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.executor import Sampled, ScheduledSequence, StepResult
from engine.loading import load_draft_heads
from engine.speculation.heads import HeadsDrafter
from engine.weights.config import UnsupportedModel
from engine.weights.heads import FILE_NAME, DraftHeads
from tests.engine.draft_layers import load_tiny, tiny_requests
from tests.engine.drafting import drafts_of, eager
from tests.engine.driver import make_sequence
from tests.engine.test_speculation_model import serve
from tests.engine.tiny_models import make_model

HIDDEN, VOCAB = 8, 12


def write_heads(
    folder: Path, *, num_heads: int = 2, hidden: int = HIDDEN, seed: int = 0, has_output: bool = False
) -> Path:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(hidden, hidden, generator=draw)
        tensors[f"{head}.0.linear.bias"] = torch.randn(hidden, generator=draw)
        if has_output:
            tensors[f"{head}.1.weight"] = torch.randn(VOCAB, hidden, generator=draw)
    save_file(tensors, folder / FILE_NAME)
    return folder


@pytest.mark.parametrize("has_output", [False, True])
def test_heads_propose_what_the_formula_of_medusa_says(tmp_path: Path, has_output: bool) -> None:
    heads = DraftHeads.read(write_heads(tmp_path, has_output=has_output), hidden_size=HIDDEN, vocab_size=VOCAB)
    draw = torch.Generator().manual_seed(1)
    states, output = torch.randn(3, HIDDEN, generator=draw), torch.randn(VOCAB, HIDDEN, generator=draw)
    found, others = heads.propose(states.numpy(), 2, 3, lambda hidden: hidden @ output.T)
    tensors = load_file(tmp_path / FILE_NAME)
    for head in range(2):
        linear = states @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"]
        moved = states + linear * torch.sigmoid(linear)
        logits = moved @ (tensors[f"{head}.1.weight"] if has_output else output).T
        assert [row[head] for row in found] == logits.argmax(-1).tolist()
        if head == 0:
            assert others == logits.argsort(-1, descending=True)[:, 1:4].tolist()


def test_heads_of_another_model_are_refused_by_the_tensor_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=FILE_NAME):
        DraftHeads.read(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    save_file({"medusa_head.0.0.linear.weight": torch.zeros(8, 8)}, tmp_path / FILE_NAME)
    with pytest.raises(UnsupportedModel, match="holds no heads"):
        DraftHeads.read(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    write_heads(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"0\.0\.linear\.weight has shape \[8, 8\]; the model needs \[9, 9\]"):
        DraftHeads.read(tmp_path, hidden_size=9, vocab_size=VOCAB)


def test_nothing_is_drafted_without_the_state_behind_the_last_token() -> None:
    drafter = HeadsDrafter(lambda states, num, others: ([[7] * num], [[8, 9][:others]]), num_heads=3, num_branches=2)
    sequence = make_sequence([1, 2, 3])
    assert drafter.prospects(sequence, 5) == []  # the first step after a handoff
    result = StepResult(sampled=[Sampled(token_id=4)], prompt_logprobs=[], states=np.zeros((1, HIDDEN), np.float32))
    drafter.observe(ScheduledSequence(sequence, 3, 1), result)
    sequence.append_token(4)
    assert drafts_of(drafter, sequence, 5) == [[7, 7, 7], [8], [9]]
    sequence.append_token(5)  # a grammar has forced it
    assert drafter.prospects(sequence, 5) == []


def test_answers_of_every_kind_are_those_without_heads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_model("llama", **sizes).save_pretrained(tmp_path)
    executor = load_tiny(tmp_path, block_size=16)
    plain, _ = serve(executor, tiny_requests(), None)
    write_heads(tmp_path, hidden=executor.hidden_size, num_heads=3)
    drafter = load_draft_heads(tmp_path, executor, num_branches=2)
    speculated, core = serve(executor, tiny_requests(), eager(drafter, num_tokens=3))
    assert speculated == plain
    assert core.load().num_drafted_tokens
