"""Experiments' files: valid ones, and messages for mistakes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from measure.experiment.arms import ArmPlans, build_arms
from measure.experiment.spec import ExperimentError, ExperimentSpec, load_experiment

MINIMAL: dict[str, Any] = {
    "name": "test",
    "serving": {"model": {"engine": "fake"}},
    "shapes": ["1P1D"],
    "workload": {},
    "loads": [1.0],
}


def load(tmp_path: Path, **changes: Any) -> ExperimentSpec:
    """Return the experiment of a file with these keys."""
    return load_experiment(write(tmp_path, **changes))


def arms(tmp_path: Path, **changes: Any) -> ArmPlans:
    """Return the arms of a file with these keys."""
    path = write(tmp_path, **changes)
    return build_arms(load_experiment(path), path=path)


def write(tmp_path: Path, **changes: Any) -> Path:
    """Write a file with these keys."""
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lods": [1]}, "experiment.yaml:lods: unknown key"),
        ({"loads": []}, "experiment.yaml:loads: "),
        ({"loads": [0]}, "experiment.yaml:loads.0: "),
        ({"repeats": 0}, "experiment.yaml:repeats: "),
        ({"shapes": ["2Q1D"]}, "experiment.yaml:shapes.0: '2Q1D' is not a pool shape; say 2P1D, or 3 aggregated"),
        ({"shapes": [{"prefill": 1}]}, "experiment.yaml:shapes.0: say both prefill and decode"),
        ({"shapes": [{"workers": 1, "decode": 1}]}, "experiment.yaml:shapes.0: workers are aggregated"),
        ({"slo": {"ttft": 1}}, "experiment.yaml:slo.ttft: unknown key"),
        ({"capacity": {"low": 2, "high": 1}}, "experiment.yaml:capacity: low: 2 is above high: 1"),
        ({"serving": 3}, "experiment.yaml:serving: "),
        ({"name": "No Name"}, "experiment.yaml:name: "),
    ],
)
def test_file_with_a_mistake_names_file_key_and_reason(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"serving": {"rooter": {}}}, "experiment.yaml:serving: arm 1P1D:rooter: unknown key"),
        ({"grid": {"router.policy": ["best"]}}, "arm 1P1D policy=best:router.policy: "),
        ({"grid": {"router.policy.x": ["best"]}, "serving": {"router": {"policy": "random"}}}, "policy holds no keys"),
        ({"shapes": [{"name": "odd", "workers": 1, "serving": {"pools.nope": 1}}]}, "arm odd:pools.prefill.nope"),
        ({"shapes": ["1P1D", {"name": "1P1D", "workers": 2}]}, "shapes: two arms are called 1P1D"),
        ({"serving": "missing.yaml"}, "missing.yaml: cannot be read"),
        ({"grid": {"simulate.policy": ["best"]}}, "policy=best:simulate.policy: 'best' is not a policy; known are"),
        ({"grid": {"simulate.planner": ["his"]}}, "arm 1P1D planner=his:simulate.planner: 'his' is not a planner; say"),
        ({"grid": {"simulate.speed": [2]}}, "arm 1P1D speed=2:simulate.speed: Extra inputs are not permitted"),
    ],
)
def test_arm_that_cannot_be_served_is_named_before_anything_is_started(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        arms(tmp_path, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "names", "added"),
    [
        (["2P1D"], ["2P1D", "3 aggregated"], ("3 aggregated",)),
        (["1P2D", "2P1D"], ["1P2D", "2P1D", "3 aggregated"], ("3 aggregated",)),
        (["1P1D", "2 aggregated"], ["1P1D", "2 aggregated"], ()),
        (["2 aggregated"], ["2 aggregated"], ()),
        ([{"prefill": 1, "decode": 1, "serving": {"simulate.planner": "ours"}}], ["1P1D"], ()),
        (
            [{"prefill": 1, "decode": 1, "threads": 1}, {"name": "one", "workers": 1, "threads": 2}],
            ["1P1D", "one"],
            (),
        ),
    ],
)
def test_shapes_without_an_aggregated_one_of_their_size_get_one(
    tmp_path: Path, shapes: list[Any], names: list[str], added: tuple[str, ...]
) -> None:
    plans = arms(tmp_path, shapes=shapes)
    assert [plan.arm.name for plan in plans.plans] == names
    assert plans.added == added


def test_aggregated_shape_with_as_many_threads_by_config_is_a_fair_comparison(tmp_path: Path) -> None:
    serving = {"model": {"engine": "fake"}, "pools": {"prefill": {"threads": 1}, "decode": {"threads": 1}}}
    plans = arms(tmp_path, serving=serving, shapes=["1P1D", {"name": "one", "workers": 1, "threads": 2}])
    assert [plan.arm.num_threads for plan in plans.plans] == [2, 2]
    assert plans.added == ()


def test_grid_gives_every_combination_with_its_settings(tmp_path: Path) -> None:
    grid = {"router.policy": ["predictive", "round_robin"], "pools.max_step_tokens": [256, 512]}
    plans = arms(tmp_path, shapes=["2 aggregated"], grid=grid).plans
    assert [plan.arm.name for plan in plans] == [
        "2 aggregated policy=predictive max_step_tokens=256",
        "2 aggregated policy=predictive max_step_tokens=512",
        "2 aggregated policy=round_robin max_step_tokens=256",
        "2 aggregated policy=round_robin max_step_tokens=512",
    ]
    last = plans[-1].serving
    assert last is not None
    assert (last.router.policy, last.pools.prefill.max_step_tokens, last.pools.decode.max_step_tokens) == (
        "round_robin",
        512,
        512,
    )
    assert (last.pools.prefill.count, last.pools.decode.count) == (0, 2)


def test_grid_over_keys_of_equal_last_names_keeps_the_settings_apart(tmp_path: Path) -> None:
    grid = {"pools.prefill.max_step_tokens": [256], "pools.decode.max_step_tokens": [512]}
    (plan, _) = arms(tmp_path, grid=grid).plans
    assert plan.arm.settings == {"pools.prefill.max_step_tokens": "256", "pools.decode.max_step_tokens": "512"}


def test_arm_is_served_locally_on_a_free_port_with_the_experiments_objectives(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("{router: {port: 50051}, pools: {decode: {threads: 3}}}", encoding="utf-8")
    shapes = [{"prefill": 1, "decode": 1, "threads": 1}]
    serving = arms(tmp_path, serving="base.yaml", shapes=shapes, slo={"ttft_s": 3.0}).plans[0].serving
    assert serving is not None
    assert (serving.launcher, serving.router.port, serving.slo.ttft_s) == ("local", 0, 3.0)
    assert (serving.pools.prefill.threads, serving.pools.decode.threads) == (1, 1)


def test_only_chooses_by_shape_or_full_name(tmp_path: Path) -> None:
    plans = arms(tmp_path, shapes=["2 aggregated", "1P1D"], grid={"router.policy": ["random", "predictive"]})
    assert len(plans.only(("1P1D",)).plans) == 2
    assert [plan.arm.name for plan in plans.only(("1P1D policy=random",)).plans] == ["1P1D policy=random"]
    with pytest.raises(ExperimentError, match="there is no arm '1P'"):
        plans.only(("1P",))


def test_external_arm_without_its_key_in_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    external = [{"name": "other", "url": "http://127.0.0.1:1/v1", "api_key_env": "OTHER_KEY"}]
    plan = arms(tmp_path, external=external).plans[-1]
    assert plan.arm.is_external
    monkeypatch.delenv("OTHER_KEY", raising=False)
    with pytest.raises(ExperimentError, match="OTHER_KEY is not set"):
        _ = plan.api_key
    monkeypatch.setenv("OTHER_KEY", "secret")
    assert plan.api_key == "secret"


def test_simulation_differs_only_in_what_its_section_says(tmp_path: Path) -> None:
    external = [{"name": "other", "url": "http://127.0.0.1:1/v1"}]
    spec = load(tmp_path, external=external, simulate={"shapes": ["8P8D"], "loads": [5]})
    simulated = spec.for_simulation()
    assert [shape.title for shape in simulated.shapes] == ["8P8D"]
    assert (simulated.loads, simulated.repeats, simulated.external) == ((5.0,), spec.repeats, ())
