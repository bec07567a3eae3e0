"""Everything that is derived from the declaration of the sampling parameters agrees with it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor

from common.errors import InvalidRequest
from common.parameter import Biases, Json, Parameter, Texts, Tokens
from common.sampling import PARAMETERS, SamplingOptions, SamplingParams
from common.wire import sampling_from_proto, sampling_to_proto
from kvrelay.v1 import sampling_pb2

DOCS = Path(__file__).parents[2] / "docs"
FIELDS = {field.name: field for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
WIRE_TYPES = {
    float: (FieldDescriptor.TYPE_DOUBLE,),
    int: (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64),
    bool: (FieldDescriptor.TYPE_BOOL,),
    Texts: (FieldDescriptor.TYPE_STRING,),
    Tokens: (FieldDescriptor.TYPE_UINT32,),
    Biases: (FieldDescriptor.TYPE_MESSAGE,),
    Json: (FieldDescriptor.TYPE_STRING,),
}
OPTION_TYPES = {
    float: float,
    int: int,
    bool: bool,
    Texts: str | Sequence[str],
    Tokens: Sequence[int],
    Biases: Mapping[int, float],
    Json: str | Mapping[str, Any] | type[Any],
}


def test_every_parameter_has_its_wire_field_and_the_reverse() -> None:
    assert {each.option for each in PARAMETERS} == set(FIELDS)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.option)
def test_wire_field_carries_every_allowed_value(parameter: Parameter) -> None:
    field = FIELDS[parameter.option]
    assert field.type in WIRE_TYPES[parameter.type]
    assert field.is_repeated is (parameter.max_entries is not None)
    if parameter.type is int:
        assert parameter.most is not None
        assert (parameter.most >= 2**32) is (field.type == FieldDescriptor.TYPE_UINT64)
    if not field.is_repeated and parameter.default:
        assert field.has_presence  # else an unset field would read as zero


def test_client_options_are_the_parameters_with_their_types() -> None:
    assert get_type_hints(SamplingOptions) == {each.option: OPTION_TYPES[each.type] for each in PARAMETERS}


def test_record_survives_the_wire() -> None:
    given = SamplingParams(
        temperature=0.5, logit_bias=((3, 1.5),), stop=("a",), stop_token_ids=frozenset({2, 5}), num_logprobs=0
    )
    for params in (given, dataclasses.replace(given, stop=(), num_logprobs=None, detokenize=False)):
        assert sampling_from_proto(sampling_to_proto(params), default_seed=1) == params
    assert sampling_from_proto(sampling_pb2.SamplingParams(), default_seed=8) == SamplingParams(seed=8)


@pytest.mark.parametrize("parameter", [each for each in PARAMETERS if each.type in (float, int)])
def test_numbers_outside_their_bounds_are_refused_by_name(parameter: Parameter) -> None:
    assert parameter.least is not None
    assert parameter.most is not None
    for value in (parameter.least, parameter.most):
        if not parameter.is_open or value != parameter.least:
            parameter.check(value, vocab_size=8)
    too_little = parameter.least if parameter.is_open else math.nextafter(parameter.least, -math.inf)
    for value in (too_little, parameter.most + 1, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match=rf"{parameter.option} is .*; allowed: ") as caught:
            parameter.check(value, vocab_size=8)
        assert caught.value.field == f"sampling.{parameter.option}"


def test_every_default_is_allowed() -> None:
    for parameter in PARAMETERS:
        parameter.check(parameter.default, vocab_size=8)


def rows_of(parameters: Sequence[Parameter]) -> list[str]:
    """Return the rows of a table in the documentation."""
    return [f"| `{p.option}` | {p.meaning} | {p.allowed} | {default_of(p)} |" for p in parameters]


def default_of(parameter: Parameter) -> str:
    default: Any = parameter.default
    if parameter.documented_default is not None:
        return parameter.documented_default
    if parameter.max_entries is not None:
        return "none"
    return f"`{default}`" if parameter.type is bool else f"{default:g}"


def test_table_in_the_documentation_is_the_declaration() -> None:
    page = (DOCS / "client.md").read_text(encoding="utf-8")
    table = page.partition("| option | meaning | allowed | default |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == rows_of(PARAMETERS)
