"""Every error class keeps status, message, field and retry hint on the wire."""

from typing import Any

import grpc
import pytest

from common.errors import KvrelayError, error_classes, from_rpc_error, to_status


class Call(grpc.RpcError):
    """A failed call at the client."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        super().__init__(details)
        self._parts = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_client_gets_the_same_error_class_that_the_server_raised(cls: type[KvrelayError]) -> None:
    code, message, trailing = to_status(cls("why", field="sampling.top_p", retry_after_s=1.5, spent_s=0.25))
    back = from_rpc_error(Call(code, message, trailing))
    assert type(back) is cls
    assert (back.message, back.field, back.retry_after_s, back.spent_s) == ("why", "sampling.top_p", 1.5, 0.25)


@pytest.mark.parametrize("cls", [c for c in error_classes() if not c.__subclasses__()], ids=lambda cls: cls.__name__)
def test_every_error_maps_to_a_specific_status(cls: type[KvrelayError]) -> None:
    assert cls.code is not grpc.StatusCode.UNKNOWN
    assert cls.code is not grpc.StatusCode.OK


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_bare_status_of_another_server_becomes_one_of_our_errors(code: grpc.StatusCode) -> None:
    assert isinstance(from_rpc_error(Call(code, "why", ())), KvrelayError)
