"""Drafts of the layers of EAGLE and MTP: the states that they read, and that answers are those without them."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from common.ids import BlockId
from common.tokens import as_tokens
from engine.executor import Branch, ScheduledSequence
from engine.runner import KeptStates
from engine.speculation.eagle import MAX_STATES, KnownStates
from engine.steps.group import Group
from tests.builders import Collector, assert_empty, core_on, run_until_idle
from tests.engine.draft_layers import (
    CONFIG,
    EAGLE,
    EAGLE3,
    MTP,
    MTP_LAYER,
    layer_tensors,
    load_layer,
    load_tiny,
    tiny_requests,
    write_layer,
    write_mimo,
)
from tests.engine.drafting import eager
from tests.engine.driver import Driver, make_sequence
from tests.engine.test_speculation_model import serve
from tests.engine.tiny_models import make_model


def test_states_behind_a_gap_begin_anew_and_known_ones_are_not_taken_twice() -> None:
    known = KnownStates()

    def take(begin: int, end: int) -> list[int]:
        known.take(np.arange(begin, end, dtype=np.float32)[:, None], end)
        return [int(row[0]) for row in known.rows]

    assert take(3, 6) == [3, 4, 5]
    assert take(1, 7) == [3, 4, 5, 6]  # computed again after a preemption
    assert take(2, 5) == [3, 4, 5, 6]
    known.forget_before(6)
    assert [int(row[0]) for row in known.rows] == [6]
    known.forget_before(7)
    assert known.begin == 6  # its token may be read again
    assert take(9, 11) == [9, 10]
    assert len(take(11, 11 + 2 * MAX_STATES)) == MAX_STATES
    assert known.begin == 11 + MAX_STATES


@pytest.fixture(name="model_dir", scope="module")
def _model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MiMo model whose next token depends on the last one alone: its layers add nothing. Its MTP layer knows it."""
    model = make_model("qwen2-tied", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding /= embedding.square().mean(-1, keepdim=True).sqrt()
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    tensors = layer_tensors(MTP, model_hidden=64)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[MTP_LAYER + name].zero_()
    for name in ("token", "final"):
        tensors[f"{MTP_LAYER}{name}_layernorm.weight"].fill_(1.0)
    tensors[f"{MTP_LAYER}input_proj.weight"] = torch.cat((torch.zeros(64, 64), torch.eye(64)), dim=1)
    return write_mimo(tmp_path_factory.mktemp("tiny"), model, tensors)


@pytest.fixture(name="layer_dir", scope="module")
def _layer_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that knows this model: its output is the embedding of the token that it reads."""
    tensors = layer_tensors(EAGLE, model_hidden=64)
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight", "fc.bias"):
        tensors[name].zero_()
    tensors["fc.weight"] = torch.cat((torch.eye(64), torch.zeros(64, 64)), dim=1)
    return write_layer(tmp_path_factory.mktemp("layer"), tensors)


@torch.inference_mode()
def test_verified_rows_give_the_states_of_steps_of_their_own_and_keep_their_bits(tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    model.save_pretrained(tmp_path)
    executor = load_tiny(tmp_path)
    driver, prompt = Driver(executor), list(range(20, 31))
    plain, one, tree = (make_sequence(prompt) for _ in range(3))
    sampled = driver.step([(plain, 11)])[0].sampled + [driver.step([(plain, 1)])[0].sampled[0] for _ in range(5)]
    executor.kept_states = KeptStates(num_tokens=8, layers=(2, 0))
    results = driver.step([(one, 11), (tree, 11)])
    assert all(result.states is not None and result.states.shape == (8, 128) for result in results)
    single = [result for _ in range(5) for result in driver.step([(one, 1)])]
    assert [each.sampled[0] for each in single] == sampled[1:]  # as without states
    right = as_tokens([each.token_id for each in sampled[1:5]])
    wrong = right[:]
    wrong[2] ^= 1
    num_shared = tree.num_computed // 4
    branch = Branch(2, right[2:], num_shared, tree.block_table[:num_shared])
    for table in (tree.block_table, branch.block_table):
        while len(table) < 4:
            table.append(driver.free.pop())
    executor.kv.copy_block(BlockId(tree.block_table[num_shared]), BlockId(branch.block_table[num_shared]))
    (result,) = executor.launch([ScheduledSequence(tree, 5, 1, draft=wrong, branches=(branch,))]).results()
    assert result.sampled == sampled[1:]
    states = [each.states for each in single]
    assert result.states is not None
    np.testing.assert_array_equal(result.states, np.concatenate([each for each in states if each is not None]))


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize(
    ("limits", "num_blocks"),
    [({}, 64), ({"max_step_tokens": 16}, 64), ({}, 9)],
    ids=["one batch", "chunked", "preempted"],
)
def test_a_layer_that_knows_the_model_is_nearly_always_right_and_changes_no_answer(
    model_dir: Path, layer_dir: Path, limits: dict[str, int], num_blocks: int, kind: Literal["eagle", "mtp"]
) -> None:
    executor = load_tiny(model_dir, block_size=16, num_blocks=num_blocks)
    plain, before = serve(executor, tiny_requests(), None, **limits)
    assert bool(before.load().num_preemptions) == (num_blocks < 10)
    drafter = load_layer(model_dir if kind == "mtp" else layer_dir, executor, kind=kind, num_branches=1)
    speculated, core = serve(executor, tiny_requests(), eager(drafter, num_tokens=4), **limits)
    assert speculated == plain
    done = core.load()
    assert done.num_accepted_tokens > 0.9 * done.num_drafted_tokens > 9
    assert drafter.num_used_blocks == 0


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_answer_to_a_prompt_read_elsewhere_is_drafted_from_its_second_step(
    model_dir: Path, layer_dir: Path, kind: Literal["eagle", "mtp"]
) -> None:
    executor, other = (load_tiny(model_dir, block_size=16) for _ in range(2))
    request = tiny_requests()[1]
    ((answer,), _core) = serve(other, [request], None)
    plain = answer[0]
    drafter = load_layer(model_dir if kind == "mtp" else layer_dir, executor, kind=kind)
    core = core_on(executor, block_size=16, speculator=eager(drafter, num_tokens=4))
    collector = Collector()
    group = core.reserve(request, collector)
    assert isinstance(group, Group)
    source = make_sequence(request.prompt_token_ids, block_size=16)
    Driver(other).step([(source, 30)])
    executor.kv.write_blocks(group.leader.block_ids()[:2], other.kv.read_blocks(source.block_ids()))
    core.commit(group, 30)
    core.start(group, [(plain[0].token_id, False)])
    run_until_idle(core)
    assert collector.outputs == plain[1:]
    done = core.load()
    assert done.num_accepted_tokens > 0.9 * done.num_drafted_tokens
    assert done.num_accepted_tokens >= 12  # of 24: one token came from elsewhere, and one without a draft
    assert_empty(core)
    assert drafter.num_used_blocks == 0


def test_answers_of_every_kind_are_those_without_a_layer_of_eagle_3(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 6}
    make_model("llama", **sizes).save_pretrained(tmp_path)
    executor = load_tiny(tmp_path, block_size=16)
    plain, _ = serve(executor, tiny_requests(), None)
    config = CONFIG | {"draft_vocab_size": 50}
    layer = write_layer(tmp_path / EAGLE3, layer_tensors(EAGLE3, config, model_hidden=64), config)
    drafter = load_layer(layer, executor, num_branches=1)
    speculated, core = serve(executor, tiny_requests(), eager(drafter, num_tokens=3))
    assert speculated == plain
    assert core.load().num_drafted_tokens
    assert drafter.num_used_blocks == 0
