"""Every method has a row in the table of roles, and a listener serves what is for its audience only."""

import importlib
import pkgutil

import kvrelay.v1
from common.trust.access import METHODS, Audience, allowed_roles
from common.trust.identity import Role


def all_methods() -> set[str]:
    """Return the full names of all methods of all our services."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(kvrelay.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"kvrelay.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return found


def test_every_method_has_a_row_in_the_table_and_every_row_a_method() -> None:
    assert set(METHODS) == all_methods()
    assert len(METHODS) > 20, "the descriptors were found"


def test_every_row_names_somebody() -> None:
    assert [method for method, roles in METHODS.items() if not roles] == []


def test_method_for_clients_is_denied_to_every_other_caller() -> None:
    for method, roles in METHODS.items():
        if Role.CLIENT in roles:
            assert roles == {Role.CLIENT}, method
        here, there = (
            (Audience.CLIENTS, Audience.INSIDERS) if Role.CLIENT in roles else (Audience.INSIDERS, Audience.CLIENTS)
        )
        assert allowed_roles(method, here) == roles
        assert allowed_roles(method, there) == frozenset(), f"{method} on the other kind of listener"


def test_unlisted_method_is_denied_everywhere() -> None:
    for audience in Audience:
        assert allowed_roles("/kvrelay.v1.WorkerService/Surprise", audience) == frozenset()
        assert allowed_roles("/grpc.channelz.v1.Channelz/GetServers", audience) == frozenset()


def test_reflection_tells_clients_only() -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert allowed_roles(method, Audience.INSIDERS) == frozenset()


def test_pulling_kv_needs_a_worker_and_controlling_one_a_controller() -> None:
    assert METHODS["/kvrelay.v1.KvTransferService/FetchBlocks"] == {Role.WORKER}
    assert METHODS["/kvrelay.v1.WorkerService/SetRole"] == {Role.CONTROLLER}
    assert METHODS["/kvrelay.v1.RouterAdminService/SetWorkers"] == {Role.CONTROLLER}
