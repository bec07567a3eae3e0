"""docs/commands.md is what the declarations of the commands say."""

from pathlib import Path

from cli.reference import reference

_PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_page_of_commands_is_the_declared_one() -> None:
    assert _PAGE.read_text(encoding="utf-8") == reference(), "run `python -m cli.reference docs/commands.md`"


def test_page_of_commands_shows_required_arguments_defaults_and_environment() -> None:
    text = reference()
    assert "| `POOL=N…` | required | prefill=3, decode=2, or both. |" in text
    assert "| `--config FILE`, `-c FILE` (`KVRELAY_CONFIG`) | `serving.yaml` | The configuration file. |" in text
    assert "#### kvrelay bench run\n" in text
