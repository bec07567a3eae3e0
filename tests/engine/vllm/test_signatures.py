"""A vLLM that this package does not know is refused in a sentence, before a model is loaded."""

import pytest

from common.engines import VLLM_VERSION
from engine.model.config import UnsupportedModel
from engine.vllm import signatures

OURS = "engine.shared_memory:map_peer_region"


@pytest.mark.parametrize(
    ("version", "used", "reason"),
    [
        (None, {}, "not installed here; docs/engines.md"),
        ("0.31.0", {}, f"needs vLLM {VLLM_VERSION}; 0.31.0 is installed"),
        (VLLM_VERSION, {"engine.no_such_module:Thing": ()}, "engine.no_such_module:Thing has no Thing"),
        (VLLM_VERSION, {OURS: ("pid", "color", "taste")}, f"{OURS} has no color, taste"),
    ],
)
def test_another_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, used: dict[str, tuple[str, ...]], reason: str
) -> None:
    monkeypatch.setattr(signatures, "installed_package", lambda _name: version)
    monkeypatch.setattr(signatures, "_USED", used)
    with pytest.raises(UnsupportedModel, match=reason):
        signatures.check_vllm()


def test_a_vllm_as_it_is_known_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "installed_package", lambda _name: f"{VLLM_VERSION}+cpu")
    monkeypatch.setattr(signatures, "_USED", {OURS: ("pid", "fd")})
    signatures.check_vllm()
