"""Placement of actors in a joined Ray cluster, and requests to its autoscaler, over a fake Ray."""

from dataclasses import dataclass, field
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from cluster.processes.plan import Placement, ProcessRole, ProcessSpec  # noqa: E402
from cluster.ray import joined_ray  # noqa: E402 - after the skip
from cluster.ray.joined_ray import ActorsLeft, JoinedRay, named_actors, pinned_to, remove_actors  # noqa: E402

_HERE = "node-0"


@dataclass
class FakeRay:
    """The parts of Ray that joined_ray uses."""

    labels: list[dict[str, str]] = field(default_factory=list)
    """Labels of each node; the first node is this one."""
    names: list[dict[str, str]] = field(default_factory=list)
    requests: list[list[tuple[dict[str, float], dict[str, str]]]] = field(default_factory=list)
    """Every request for hosts: bundles and their labels."""

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": f"node-{i}", "Alive": True, "Labels": labels} for i, labels in enumerate(self.labels)]

    def request(self, *, bundles: list[dict[str, float]], bundle_label_selectors: list[dict[str, str]]) -> None:
        self.requests.append(list(zip(bundles, bundle_label_selectors, strict=True)))


class Context:
    """The runtime context of this actor."""

    def get_node_id(self) -> str:
        return _HERE


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    told = FakeRay()
    monkeypatch.setattr(ray, "nodes", told.nodes)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: told.names)
    monkeypatch.setattr(joined_ray, "this_host", lambda: "192.0.2.10")
    monkeypatch.setattr(joined_ray, "request_resources", told.request)
    monkeypatch.setattr(joined_ray, "_remove_group", lambda name: None)
    return told


def worker(name: str, placement: Placement = Placement.PACK, **resources: float) -> ProcessSpec:
    role = ProcessRole(name.partition("-")[0])
    return ProcessSpec(name=name, role=role, host=None, port=0, placement=placement, **resources)  # type: ignore[arg-type]


@pytest.mark.parametrize(("placement", "strategy"), [(Placement.SPREAD, "SPREAD"), (Placement.PACK, "DEFAULT")])
def test_worker_goes_to_its_own_pools_hosts_and_spreads_over_them_when_asked(
    fake: FakeRay, placement: Placement, strategy: str
) -> None:
    fake.labels = [{"pool": "head"}, {"pool": "decode"}]

    options = JoinedRay("mine").options(worker("decode-0", placement))

    assert options["label_selector"] == {"pool": "decode"}
    assert options["scheduling_strategy"] == strategy
    assert (options["lifetime"], options["get_if_exists"], options["namespace"]) == ("detached", True, "kvrelay")


def test_worker_goes_anywhere_where_no_host_says_its_pool(fake: FakeRay) -> None:
    fake.labels = [{}, {}]

    assert "label_selector" not in JoinedRay("mine").options(worker("decode-0"))


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ([{"pool": "head"}, {"pool": "router"}], {"pool": "router"}),
        ([{"pool": "head"}, {"pool": "decode"}], {"pool": "!head"}),
        ([{"pool": "head"}], {"pool": "!head"}),
        ([{}, {}], {"ray.io/node-id": f"!{_HERE}"}),
        ([{"pool": "decode"}, {"pool": "decode"}], {"ray.io/node-id": f"!{_HERE}"}),
        ([{}], None),
        ([{"pool": "decode"}], None),
    ],
)
def test_further_router_goes_to_a_routers_host_else_elsewhere_else_here(
    fake: FakeRay, labels: list[dict[str, str]], place: dict[str, str] | None
) -> None:
    fake.labels = labels

    first = JoinedRay("mine").options(worker("router-0"))
    second = JoinedRay("mine").options(worker("router-1"))

    here = pinned_to("192.0.2.10")
    assert first | here == first
    assert (second | here == second) is (place is None)
    assert second.get("label_selector") == place


def test_autoscaler_request_covers_exactly_the_wanted_workers(fake: FakeRay) -> None:
    fake.labels = [{"pool": "head"}]
    home = JoinedRay("mine")

    home.options(worker("router-0"))
    home.options(worker("prefill-0", num_cpus=4))
    home.options(worker("decode-0", num_cpus=2, num_gpus=1))
    home.forget("prefill-0")
    home.forget("decode-0")

    prefill, decode = ({"CPU": 4.0}, {"pool": "prefill"}), ({"CPU": 2.0, "GPU": 1.0}, {"pool": "decode"})
    assert fake.requests == [[], [prefill], [prefill, decode], [decode], []]


def test_free_room_is_that_of_the_hosts_that_may_run_a_worker(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.labels = [{"pool": "head"}, {"pool": "decode"}, {"pool": "decode"}]
    free = {"node-0": {"CPU": 8.0}, "node-1": {"CPU": 1.0}}  # Ray leaves out what is not free
    monkeypatch.setattr(joined_ray, "available_resources_per_node", lambda: free)
    home, spec = JoinedRay("mine"), worker("decode-0", num_cpus=4)
    home.options(spec)

    assert home.free_on(spec) == [{"CPU": 1.0}, {}]


def test_missing_autoscaler_does_not_prevent_a_start(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no autoscaler")

    monkeypatch.setattr(joined_ray, "request_resources", refuse)

    assert JoinedRay("mine").options(worker("decode-0", num_cpus=1))["lifetime"] == "detached"


def test_hosts_of_a_worker_are_named_by_their_label_after_it_was_placed(fake: FakeRay) -> None:
    fake.labels = [{"pool": "head"}, {"pool": "decode"}]
    home, spec = JoinedRay("mine"), worker("decode-0", num_cpus=4)
    assert home.hosts_of(spec) == "host"
    home.options(spec)
    assert home.hosts_of(spec) == "host with the label pool=decode"


def test_actors_that_do_not_end_are_no_success(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.names = [{"namespace": "kvrelay", "name": f"mine/{name}"} for name in ("controller", "decode-0")]
    killed: list[str] = []
    monkeypatch.setattr(joined_ray, "_kill", killed.append)
    monkeypatch.setattr(joined_ray, "_END_TIMEOUT_S", 0.0)
    monkeypatch.setattr(joined_ray, "_POLL_S", 0.0)
    with pytest.raises(ActorsLeft, match="decode-0 did not end within 0 s"):
        remove_actors("mine")
    assert killed == ["mine/controller", "mine/decode-0"]

    monkeypatch.setattr(joined_ray, "_kill", lambda name: fake.names.clear())
    assert remove_actors("mine") == {"controller", "decode-0"}


def test_only_actors_of_this_cluster_and_namespace_are_its_own(fake: FakeRay) -> None:
    names = [("kvrelay", "mine/decode-0"), ("kvrelay", "mine/controller"), ("kvrelay", "mine2/decode-1")]
    fake.names = [{"namespace": space, "name": name} for space, name in [*names, ("other", "mine/decode-2")]]

    assert named_actors("mine") == {"decode-0", "controller"}
    assert JoinedRay("mine").found() == {"decode-0"}
