import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model_files import default_model_dir, is_checkpoint
from common.text_files import load_tokenizer
from measure.workload.content import ContentWriter
from measure.workload.sessions import Segment

WRITER = ContentWriter(seed=7, first_token=100, num_tokens=5000)
segments = st.lists(st.builds(Segment, st.integers(0, 2**70), st.integers(1, 40)), max_size=8)


@given(segments)
def test_tokens_are_as_many_as_the_segments_say_and_within_the_range(recipe: list[Segment]) -> None:
    tokens = WRITER.tokens(recipe)
    assert tokens.typecode == "I"
    assert len(tokens) == sum(segment.num_tokens for segment in recipe)
    assert all(100 <= token < 5100 for token in tokens)


@given(segments)
def test_prompt_is_its_segments_in_a_row(recipe: list[Segment]) -> None:
    apart = [token for segment in recipe for token in WRITER.tokens([segment])]
    assert list(WRITER.tokens(recipe)) == apart


@given(st.integers(0, 2**40), st.integers(1, 50), st.integers(1, 50))
def test_shorter_segment_is_a_prefix_of_a_longer_one_of_the_same_content(content: int, length: int, more: int) -> None:
    short, long = [Segment(content, length)], [Segment(content, length + more)]
    assert WRITER.tokens(long)[:length] == WRITER.tokens(short)
    assert WRITER.text(long).startswith(WRITER.text(short))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 50))
def test_blocks_are_equal_only_with_equal_contents_and_seeds(one: int, two: int, seed: int, other_seed: int) -> None:
    def write(content: int, seed: int) -> tuple[list[int], str]:
        writer = ContentWriter(seed=seed, num_tokens=200)
        recipe = [Segment(content, 16)]
        return list(writer.tokens(recipe)), writer.text(recipe)

    tokens, text = write(one, seed)
    other_tokens, other_text = write(two, other_seed)
    is_same = (one, seed) == (two, other_seed)
    assert (tokens == other_tokens) is is_same
    assert (text == other_text) is is_same


def test_every_block_of_two_contents_differs_even_with_few_tokens() -> None:
    writer = ContentWriter(seed=0, num_tokens=50)
    one, two = (writer.tokens([Segment(content, 16_000)]) for content in (1, 2))
    assert all(one[i : i + 16] != two[i : i + 16] for i in range(0, 16_000, 16))


def test_tokens_are_spread_evenly() -> None:
    counts = Counter(ContentWriter(seed=3, num_tokens=10).tokens([Segment(1, 100_000)]))
    assert sorted(counts) == list(range(10))
    assert all(9_500 < count < 10_500 for count in counts.values())


def test_the_whole_range_of_ids_can_be_used() -> None:
    tokens = ContentWriter(seed=3, num_tokens=1 << 32).tokens([Segment(1, 1000)])
    assert max(tokens) > 0.99 * 2**32


def test_text_is_sentences_of_many_words() -> None:
    text = WRITER.text([Segment(5, 4000)])
    assert re.fullmatch(r"([A-Z][a-z]*( [a-zI]+)+\. )*[A-Z][a-z]*( [a-zI]+)*\.?", text)
    words = Counter(re.findall(r"\w+", text.lower()))
    assert len(words) > 500
    assert words.most_common(1)[0][1] < 0.1 * sum(words.values())


@given(segments)
def test_text_has_a_word_or_full_stop_for_each_unit(recipe: list[Segment]) -> None:
    assert len(re.findall(r"\w+|\.", WRITER.text(recipe))) == sum(segment.num_tokens for segment in recipe)


@pytest.mark.model
@pytest.mark.skipif(not is_checkpoint(default_model_dir()), reason="run `kvrelay fetch-model` once")
def test_a_unit_of_text_is_a_token_of_the_default_model() -> None:
    tokenizer = load_tokenizer(default_model_dir())
    text = WRITER.text([Segment(content, 100) for content in range(100)])
    assert len(tokenizer.encode(text).ids) == pytest.approx(10_000, rel=0.002)


def test_another_process_writes_the_same() -> None:
    program = (
        "from measure.workload.content import ContentWriter; from measure.workload.sessions import Segment;"
        "w = ContentWriter(seed=7, first_token=100, num_tokens=5000);"
        "print(list(w.tokens([Segment(9, 5)])), w.text([Segment(9, 12)]))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{list(WRITER.tokens([Segment(9, 5)]))} {WRITER.text([Segment(9, 12)])}"
