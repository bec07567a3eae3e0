"""engine.row_map: every key of a batch has a row of its own; the longest unused one is given away."""

from hypothesis import given
from hypothesis import strategies as st

from engine.row_map import RowMap

KEYS = st.integers(0, 9)


@given(st.lists(st.lists(KEYS, max_size=4), max_size=30))
def test_assign_in_any_order_gives_distinct_keys_distinct_rows(batches: list[list[int]]) -> None:
    rows: RowMap[int] = RowMap(4)
    for batch in batches:
        given_rows = dict(zip(batch, rows.assign(batch), strict=True))
        assert len(set(given_rows.values())) == len(given_rows)
        assert set(given_rows.values()) <= set(range(4))
        assert rows.assign(batch) == [given_rows[key] for key in batch]


def test_assign_when_rows_are_all_given_takes_the_one_unused_longest() -> None:
    rows: RowMap[str] = RowMap(3)
    first = dict(zip("abc", rows.assign(["a", "b", "c"]), strict=True))
    rows.assign(["a"])
    assert rows.assign(["d", "b"]) == [first["c"], first["b"]]
    assert rows.assign(["a"]) == [first["a"]]


def test_grow_keeps_what_is_given_and_adds_rows() -> None:
    rows: RowMap[str] = RowMap(1)
    (kept,) = rows.assign(["a"])
    rows.grow(3)
    assert sorted(rows.assign(["a", "b", "c"])) == [0, 1, 2]
    assert rows.assign(["a"]) == [kept]
    assert rows.num_rows == 3
