"""Structured answers follow their grammars, and are the same however they were computed."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from common.structured_outputs import MAX_DEPTH, read_structure, structure_text
from engine.core import EngineCore
from engine.request import EngineRequest
from engine.text.grammar import Grammars
from tests import builders
from tests.builders import FAKE_GRAMMARS, assert_empty, expected_tokens, make_request, run_until_idle, served, submit

MakeCore = Callable[..., EngineCore]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "regex": {"regex": "[a-f]{3}-[0-9]{2}"},
    "choice": {"choice": ["yes", "no", 'may"be']},
    "grammar": {"grammar": 'start: "(" start ")" | "x"'},
}
TAGS = {
    "triggers": ["<f"],
    "structures": [
        {"begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
}


@pytest.fixture(name="make_core", params=[1, 2], ids=["in turn", "overlapped"])
def _make_core(request: pytest.FixtureRequest) -> MakeCore:
    return partial(builders.make_core, max_steps_in_flight=request.param, num_blocks=128)


def text_of(token_ids: list[int]) -> str:
    assert token_ids[-1] == EOS_TOKEN_ID, "the answer is complete"
    return bytes(token_ids[:-1]).decode()


def is_right(kind: str, text: str) -> bool:
    match kind:
        case "json":
            person = json.loads(text)
            return set(person) == {"name", "age"} and 0 <= person["age"] <= 99 and len(person["name"]) <= 6
        case "regex":
            return re.fullmatch("[a-f]{3}-[0-9]{2}", text) is not None
        case "choice":
            return text in STRUCTURES["choice"]["choice"]
        case _:
            return re.fullmatch(r"(\(*)x(\)*)", text) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_complete_answer_has_its_structure(make_core: MakeCore, kind: str, temperature: float) -> None:
    structure = structure_text(STRUCTURES[kind])
    for seed in range(4):
        request = make_request(
            range(seed + 3), structured_outputs=structure, max_tokens=300, temperature=temperature, seed=seed
        )
        core = make_core()
        token_ids = served(core, request).token_ids()
        assert is_right(kind, text_of(token_ids))
        assert token_ids == expected_tokens(request)
        assert_empty(core)


def test_structured_answer_is_the_same_in_a_batch_and_from_any_token_on(make_core: MakeCore) -> None:
    structure = structure_text(STRUCTURES["json"])
    request = make_request(range(5), structured_outputs=structure, max_tokens=300, seed=3, temperature=1.0)
    alone = served(make_core(), request).token_ids()
    core = make_core()
    crowd = [submit(core, make_request(range(number, 20), max_tokens=40)) for number in range(5)]
    _group, beside = submit(core, request)
    run_until_idle(core)
    assert beside.token_ids() == alone
    assert all(collector.token_ids() for _group, collector in crowd)
    for num_before in (1, len(alone) // 2, len(alone) - 1):
        rest = make_request(
            range(5),
            output=alone[:num_before],
            structured_outputs=structure,
            max_tokens=300,
            seed=3,
            temperature=1.0,
        )
        assert served(make_core(), rest).token_ids() == alone[num_before:]


def test_samples_of_one_prompt_each_follow_the_grammar(make_core: MakeCore) -> None:
    structure = structure_text(STRUCTURES["regex"])
    request = make_request(range(7), structured_outputs=structure, max_tokens=50, n=4, temperature=1.0, seed=1)
    collector = served(make_core(), request)
    texts = [text_of(collector.token_ids(sample)) for sample in range(4)]
    assert all(is_right("regex", text) for text in texts)
    assert len(set(texts)) > 1


def test_structure_behind_a_trigger_in_free_text_is_kept_to() -> None:
    grammar = FAKE_GRAMMARS.compile(structure_text({"structural_tag": TAGS}))
    for text in (b"free <text", b"so: <f=a>22</f> and <f=b>true</f>.", b"<f=b>false</f>"):
        grammar.check(text)
        state = grammar.begin()
        state.allowed(text)
        assert state.is_complete
    for text in (b"<f=c", b"<f=a>3", b"<f=b>true</g"):
        with pytest.raises(InvalidRequest, match="does not follow"):
            grammar.check(text)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "exactly one of the keys"),
        ('{"json": {}, "regex": "a"}', "exactly one of the keys"),
        ('{"yaml": "a"}', "'yaml'"),
        ('{"regex": 3}', "regex must be a string; got int"),
        ('{"choice": []}', "1 to 1024 strings"),
        ('{"structural_tag": {"triggers": ["<f"]}}', "structures must be a list of 1 to 128"),
        ('{"structural_tag": {"triggers": ["<f"], "structures": [{}]}}', r"structures\[0\] must be"),
        (
            '{"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "a", "schema": {}, "end": ""}]}}',
            "start with one of the triggers",
        ),
        ('{"json_object": false}', "must be true"),
        ('{"json": "nothing"}', "not a schema in JSON"),
        ('{"json": ' + '{"not":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 2), "levels"),
    ],
)
def test_structure_that_cannot_be_is_refused_with_the_reason(given: str, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault) as caught:
        read_structure(given)
    assert caught.value.field == "sampling.structured_outputs"


@pytest.mark.parametrize(
    ("structure", "fault"),
    [
        ({"regex": "(["}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"grammar": "start: missing"}, "missing"),
    ],
)
def test_structure_that_cannot_be_compiled_is_refused_with_the_reason(structure: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        FAKE_GRAMMARS.compile(structure_text(structure))


def test_tokens_of_another_answer_are_not_taken_for_a_beginning() -> None:
    grammar = FAKE_GRAMMARS.compile(structure_text(STRUCTURES["choice"]))
    grammar.check(list(b"ye"))
    with pytest.raises(InvalidRequest, match="output token 1 does not follow"):
        grammar.check(list(b"yo"))


def num_steps_of(core: EngineCore, request: EngineRequest) -> tuple[int, list[int]]:
    """Return the steps and the tokens of a request that runs alone."""
    _group, collector = submit(core, request)
    return run_until_idle(core), collector.token_ids()


@pytest.mark.parametrize("num_blocks", [128, 48])
def test_forced_text_takes_no_steps_of_its_own_and_is_the_same_as_step_by_step(
    make_core: MakeCore, num_blocks: int
) -> None:
    structure = structure_text({"regex": "a first long name: (x|y), another long name: (x|y), and the last: (x|y)!"})
    options: dict[str, Any] = {"structured_outputs": structure, "max_tokens": 120, "temperature": 1.0}
    request = make_request(range(6), seed=5, **options)
    num_steps, token_ids = num_steps_of(make_core(num_blocks=num_blocks), request)
    slow = make_request(range(6), seed=5, num_logprobs=0, **options)
    num_slow_steps, slow_token_ids = num_steps_of(make_core(num_blocks=num_blocks), slow)
    assert token_ids == slow_token_ids == expected_tokens(request)
    assert num_slow_steps >= len(token_ids) > 60 > 20 > num_steps
    core = make_core(num_blocks=num_blocks)
    crowd = [submit(core, make_request(range(6), seed=seed, **options)) for seed in range(5, 11)]
    run_until_idle(core)
    assert crowd[0][1].token_ids() == token_ids
    assert core.scheduler.num_preemptions > 0 or num_blocks == 128
    assert_empty(core)


def test_answers_beside_forced_text_get_a_token_in_every_step(make_core: MakeCore) -> None:
    structure = structure_text({"choice": ["a text without any choice in it, " * 3]})
    core = make_core(num_blocks=2000, max_step_tokens=32)
    forced = [
        submit(core, make_request(range(6), structured_outputs=structure, max_tokens=200, seed=seed))[1]
        for seed in range(12)
    ]
    _group, plain = submit(core, make_request(range(9), max_tokens=60, ignore_eos=True))
    num_steps = 0
    while len(plain.outputs) < 60:
        for group, event in core.step():
            group.sink(event)
        core.wake()
        num_steps += 1
    assert num_steps < 60 + 30, "its tokens wait for nobody, once its prompt is computed"
    run_until_idle(core)
    assert all(text_of(each.token_ids()) == "a text without any choice in it, " * 3 for each in forced)


def test_large_vocabulary_is_read_before_the_first_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.grammar.LARGE_VOCABULARY", 1)
    grammars = Grammars(byte_tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_TOKEN_ID}))
    monkeypatch.delattr("llguidance.LLTokenizer")
    assert grammars.compile(structure_text(STRUCTURES["regex"])).begin().allowed(()).any()
