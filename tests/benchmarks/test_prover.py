"""The guards that the prover takes out are in the code, and it leaves none out for good."""

import ast
from pathlib import Path

import pytest

from benchmarks.guards import GUARDS, Edit, Guard
from benchmarks.prover import REPO, run_walks, without


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_guard_is_still_in_the_code_and_what_is_left_without_it_is_python(guard: Guard) -> None:
    texts: dict[str, str] = {}
    for edit in guard.edits:
        texts[edit.file] = edit.applied(texts.get(edit.file) or (REPO / edit.file).read_text(encoding="utf-8"))
    for text in texts.values():
        ast.parse(text)


def test_guard_is_back_after_its_walks(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    guard = Guard(name="g", edits=(Edit(file="a.py", old="1", new="3"), Edit(file="a.py", old="2", new="4")))
    with without(guard, tmp_path):
        assert (tmp_path / "a.py").read_text() == "x = 3\ny = 4\n"
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 2\n"


def test_edit_of_a_text_that_has_changed_is_refused() -> None:
    with pytest.raises(ValueError, match="stands there 2 times"):
        Edit(file="a.py", old="x", new="y").applied("x x")


def test_guard_counts_as_noticed_only_where_walks_have_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot judge 'g': pytest ended with 4"):
        run_walks(tmp_path, "g")
