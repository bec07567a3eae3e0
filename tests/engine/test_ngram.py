"""Drafts from repetitions in a text: where they come from, and how likely they are to be right."""

from hypothesis import given
from hypothesis import strategies as st

from common.tokens import as_tokens
from engine.speculation.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter, NgramIndex
from tests.engine.drafting import a_sequence, draft_of, drafts_of

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def common_len(text: list[int], place: int) -> int:
    """Return how many tokens before a place are those at the end of a text."""
    length = 0
    while length < min(MAX_MATCH, place) and text[place - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


@given(text=TEXTS, pieces=st.lists(st.integers(1, 7), max_size=10))
def test_source_of_a_draft_is_the_latest_place_with_the_longest_match(text: list[int], pieces: list[int]) -> None:
    index, known = NgramIndex(), as_tokens(())
    for size in [*pieces, len(text)]:
        known += as_tokens(text[len(known) : len(known) + size])
        assert index.extend(known)
    behind_pair = [p for p in range(MIN_MATCH, len(text)) if common_len(text, p) >= MIN_MATCH][-8:]
    longest = {text[p]: (common_len(text, p), p) for p in sorted(behind_pair, key=lambda p: (common_len(text, p), p))}
    expected = sorted(longest.values(), reverse=True)
    assert [(match_len, place) for place, match_len in index.find(known, 3)] == expected[:3]
    assert index.find(known) == index.find(known, 3)[:1]


def test_other_continuations_of_the_same_words_are_branches_of_their_own() -> None:
    drafter, sequence = NgramDrafter(num_branches=2), a_sequence(0)
    sequence.token_ids = as_tokens([1, 2, 8, 1, 2, 9])
    found = []
    for time in range(30):  # the draft and its branch are right by turns
        sequence.token_ids += as_tokens([1, 2])
        found.append(drafter.prospects(sequence, 1))
        drafts = drafts_of(drafter, sequence, 1)
        sequence.token_ids.append(drafts[time % 2][0])
    assert sorted(draft[0] for draft in drafts) == [8, 9]
    assert all(branch[0] <= chain[0] for chain, branch in found)
    assert found[-1][1][0] > 2 * found[0][1][0]


def test_draft_continues_what_repeats_and_grows_sure_of_itself() -> None:
    drafter, sequence = NgramDrafter(), a_sequence(0)
    sequence.token_ids = as_tokens([7, 8, 9, 5, 7, 8])
    first = drafter.prospects(sequence, 6)
    assert draft_of(drafter, sequence, 6) == [9, 5, 7, 8, 9, 5]  # beyond the end of the text, the draft repeats itself
    for token_id in [9, 5, 7, 8] * 6:
        sequence.token_ids.append(token_id)
        later = drafter.prospects(sequence, 6)
    assert later[0][0] > first[0][0]
    assert later[0] == sorted(later[0], reverse=True)
    for token_id in (1, 2, 3, 4):
        sequence.token_ids.append(token_id)
    assert drafter.prospects(sequence, 6)[0][0] < 0.5


def test_draft_comes_back_to_its_source_behind_a_word_that_was_replaced_or_put_in() -> None:
    drafter, source = NgramDrafter(), list(range(100, 130))
    for written, follows in (([100, 101, 102, 1], 104), ([100, 101, 102, 1, 103], 104), ([100, 101, 102, 104], 105)):
        sequence = a_sequence(0)
        sequence.token_ids = as_tokens([*source, *written[:3]])
        drafter.prospects(sequence, 4)
        for token_id in written[3:]:
            sequence.token_ids.append(token_id)
            draft = draft_of(drafter, sequence, 4)
        assert draft == list(range(follows, follows + 4))


def test_predictions_that_fail_lower_the_chances_without_any_verified_draft() -> None:
    drafter, sequence = NgramDrafter(), a_sequence(0)
    sequence.token_ids = as_tokens([1, 2])
    chances = []
    for other in range(10, 40):  # what follows [1, 2] is never what followed it before
        sequence.token_ids += as_tokens([other, 1, 2])
        chances.append(drafter.prospects(sequence, 1)[0][0])
    assert chances[-1] < 0.5 * chances[0]
