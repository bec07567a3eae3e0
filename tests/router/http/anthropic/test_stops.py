"""Which stop sequence ended an answer is told only where it is certain."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.v1.sampling_pb2 import SampleToken
from router.http.anthropic.stops import StopFinder, matched_stop


@pytest.mark.parametrize(
    ("stops", "text", "decoded", "found"),
    [
        (["stop"], "I will ", "I will stop", "stop"),
        (["stop"], "I will ", "I will stopping", "stop"),
        (["stop"], "I will ", "I will <|im_end|>", None),
        (["|>"], "I will ", "I will <|im_end|>", None),
        (["no", "stop"], "no", "no stop", None),
        (["op", "stop"], "I ", "I stop", "stop"),
        (["b", "bc"], "a", "abc", "b"),
        (["bc", "abc"], "", "abc", "abc"),
        (["a"], "", "a", "a"),
        ([], "a", "ab", None),
        (["x"], "a\N{REPLACEMENT CHARACTER}", "é", None),
    ],
)
def test_stop_is_what_follows_the_text(stops: Sequence[str], text: str, decoded: str, found: str | None) -> None:
    assert matched_stop(stops, text=text, decoded=decoded) == found


@given(st.text("ab", max_size=80), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
async def test_finder_agrees_with_a_stream_of_single_characters(answer: str, stops: list[str]) -> None:
    async def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    finder, expected = StopFinder(stops, decode), None
    ends = {end for stop in stops for end in range(len(answer) + 1) if answer[:end].endswith(stop)}
    if ends:
        answer = answer[: min(ends)]
        expected = max((stop for stop in stops if answer.endswith(stop)), key=len)
    text = answer.removesuffix(expected or "")
    for position, letter in enumerate(answer):
        finder.push(SampleToken(token_id=ord(letter), text=text[position : position + 1]))
    assert (await finder.find() if expected else None) == expected
