from pathlib import Path

import pytest

from measure.simulate.roofline import Roofline
from measure.simulate.timing_file import TimingFileError, read_timing, write_timing


def test_written_model_reads_back_as_it_was(tmp_path: Path) -> None:
    timing = Roofline.preset("qwen3-8b", "h100").linearized(max_step_tokens=512)
    write_timing(tmp_path / "t.json", timing, kv_bytes_per_token=147_456)
    assert read_timing(tmp_path / "t.json") == (timing, 147_456)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Invalid JSON"),
        ('{"prefill": {"constant_s": -1}}', "prefill.constant_s: Input should be greater than or equal to 0"),
        ('{"prefill": {"constant_s": 1}, "decode": {"constant_s": 1, "speed": 3}}', "decode.speed: Extra inputs"),
    ],
)
def test_bad_file_is_refused_with_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TimingFileError) as caught:
        read_timing(path)
    assert str(caught.value).startswith(f"{path}: {complaint}")
