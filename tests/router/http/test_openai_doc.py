"""docs/openai.md names every field, endpoint and error code."""

import re
from pathlib import Path

import pytest

from common.errors import error_classes
from router.http import errors
from router.http.errors import ErrorKind, kind_of
from router.http.schema import ChatBody, CompletionBody, DetokenizeBody, Extension, StreamOptions, TokenizeBody

DOC = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"[a-z_]+", DOC))


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, StreamOptions, Extension, TokenizeBody, DetokenizeBody])
def test_doc_names_every_field(kind: type) -> None:
    fields = set(getattr(kind, "model_fields", {}))
    assert fields
    assert fields <= NAMED


def test_doc_names_every_error_code() -> None:
    kinds = [kind_of(cls("")) for cls in error_classes() if cls.__module__ == "common.errors"]
    kinds += [kind for kind in vars(errors).values() if isinstance(kind, ErrorKind)]
    hidden = {"client_gone", "access_denied"}  # of direct streams, which only gRPC has
    assert {kind.code for kind in kinds if kind.code} - hidden <= NAMED
    assert {str(kind.status) for kind in kinds} - {"403", "499"} <= set(re.findall(r"\d{3}", DOC))
