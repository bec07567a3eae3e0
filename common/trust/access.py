"""The table of roles that may call each method, by listener. Methods that are not listed are denied.

| listener | audience | services |
|---|---|---|
| door of a router | clients | InferenceService, health, reflection |
| direct door of a worker | clients with a capability | DirectService, health |
| administration of a router | the controller | RouterAdminService, health |
| control of a worker | routers, controller, operators | WorkerService, Prefill-, Decode-, PrefixService, health |
| KV plane of a worker | workers with a ticket | KvTransferService, health |
| control socket of the controller | operators, by the permissions of the run folder | ControllerService |

Doors are open to all clients; the rights of a call depend on its tenant (router/doors/authentication.py) or its
capability (decode_worker/direct.py). Inside listeners identify every caller by its certificate, or by a proof of it.
"""

from collections.abc import Mapping
from enum import Enum, unique

from common.trust.identity import Role

_PACKAGE = "kvrelay.v1"
_HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
_REFLECTION = (
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)


def _methods(service: str, **roles: frozenset[Role]) -> dict[str, frozenset[Role]]:
    return {f"/{_PACKAGE}.{service}/{method}": allowed for method, allowed in roles.items()}


_CLIENTS = frozenset({Role.CLIENT})
_ROUTERS = frozenset({Role.ROUTER})
_WORKERS = frozenset({Role.WORKER})
_CONTROLLER = frozenset({Role.CONTROLLER})
_OPERATORS = frozenset({Role.OPERATOR})
_INSIDERS = frozenset({Role.ROUTER, Role.WORKER, Role.CONTROLLER, Role.OPERATOR})

METHODS: Mapping[str, frozenset[Role]] = {
    # Tenants see their own requests, decisions and traffic; only operators among them may call
    # GetClusterStatus, Diagnose and ForgetTenant.
    **_methods(
        "InferenceService",
        Generate=_CLIENTS,
        Embed=_CLIENTS,
        Tokenize=_CLIENTS,
        ListModels=_CLIENTS,
        GetClusterStatus=_CLIENTS,
        Diagnose=_CLIENTS,
        Explain=_CLIENTS,
        ForgetTenant=_CLIENTS,
        RecordTraffic=_CLIENTS,
    ),
    **_methods("DirectService", StreamTokens=_CLIENTS),
    **_methods("RouterAdminService", SetWorkers=_CONTROLLER, GetDemand=_CONTROLLER),
    **_methods(
        "WorkerService",
        DescribeWorker=_ROUTERS | _CONTROLLER | _OPERATORS,
        WatchWorker=_ROUTERS,
        GetWorkerStatus=_ROUTERS | _CONTROLLER | _OPERATORS,
        ProbePeer=_OPERATORS,
        SetRole=_CONTROLLER,
        RunTrial=_CONTROLLER,
        ForgetBlocks=_ROUTERS,
        ExpectReturns=_ROUTERS,
    ),
    **_methods("PrefillService", Prefill=_ROUTERS),
    **_methods("DecodeService", DecodeMany=_ROUTERS),
    **_methods("PrefixService", ListHotPrefixes=_CONTROLLER, PullPrefixes=_CONTROLLER, ReadAhead=_ROUTERS),
    **_methods("KvTransferService", DescribePages=_WORKERS, FetchBlocks=_WORKERS),
    **_methods(
        "ControllerService",
        Scale=_OPERATORS,
        RestartWorkers=_OPERATORS,
        Rollout=_OPERATORS,
        Stop=_OPERATORS,
        GetPlan=_OPERATORS,
        ListChanges=_OPERATORS,
        CancelChange=_OPERATORS,
    ),
}


@unique
class Audience(Enum):
    """Callers of a listener."""

    CLIENTS = "clients"
    """All clients; they show no certificate."""
    INSIDERS = "insiders"
    """Processes of the cluster and its operators; each proves its identity."""


def allowed_roles(method: str, audience: Audience) -> frozenset[Role]:
    """Return the roles that may call a method (full name) on a listener of `audience`; none for unknown methods."""
    if method in _HEALTH:
        return _CLIENTS if audience is Audience.CLIENTS else _INSIDERS
    if method in _REFLECTION:
        return _CLIENTS if audience is Audience.CLIENTS else frozenset()
    roles = METHODS.get(method, frozenset())
    return roles if (Role.CLIENT in roles) is (audience is Audience.CLIENTS) else frozenset()
