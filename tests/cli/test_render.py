import pytest
from rich.console import Console

from cli.console import write_text
from cli.render import SplitTable, byte_count, seconds, throughput


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (None, "–"),
        (0.0, "0.0 ms"),
        (0.0014, "1.4 ms"),
        (0.25, "250 ms"),
        (1.5, "1.50 s"),
        (119.0, "119.00 s"),
        (125.0, "2 min 05 s"),
        (7384.0, "2 h 03 min"),
    ],
)
def test_seconds_have_a_unit_that_suits(value_s: float | None, text: str) -> None:
    assert seconds(value_s) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_byte_count_has_a_unit_that_suits(value: int, text: str) -> None:
    assert byte_count(value) == text


def test_throughput_without_time_has_no_rate() -> None:
    assert throughput(4, 2.0) == "4 tokens in 2.00 s · 2.0 tokens/s"
    assert throughput(0, 0.0) == "0 tokens in 0.00 s · – tokens/s"


def test_write_text_on_a_terminal_drops_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b[2Jb\x07\tc\n"
    write_text(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write_text(text)
    assert capsys.readouterr().out == "a[2Jb\tc\n"


@pytest.mark.parametrize(("width", "num_parts"), [(80, 1), (27, 2), (18, 4)])
def test_split_table_shows_whole_cells_and_names_the_row_in_each_part(width: int, num_parts: int) -> None:
    console = Console(width=width)
    table = SplitTable(("worker", "state", "pages", "KV in", "up"), [("w-0", "ready", "12345", "1 MiB")], num_left=2)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    assert all(len(text) <= width for text in lines)
    assert sum("w-0" in text for text in lines) == num_parts
    cells = [cell.strip() for text in lines if "w-0" in text for cell in text.split("│")]
    assert [cell for cell in cells if cell not in ("w-0", "")] == ["ready", "12345", "1 MiB"]
