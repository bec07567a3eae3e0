"""The supervisor receives exactly the requests of the command line."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.changes.rollout import RolloutTerms
from cluster.changes.scaling import Report
from cluster.control import rollout, serving_control
from common.config import ServingConfig
from common.errors import EngineFault
from tests.cluster.support import make_config

CONFIG = make_config(router={"port": 1})


class RecordingRollouts:
    """Records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[ServingConfig, RolloutTerms]] = []

    async def run(self, config: ServingConfig, terms: RolloutTerms, report: Report) -> None:
        self.asked.append((config, terms))
        report("begun")
        raise EngineFault("the canary is bad")


@pytest.mark.parametrize("is_forced", [True, False])
async def test_rollout_receives_every_term_and_returns_steps_and_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_forced: bool
) -> None:
    rollouts = RecordingRollouts()
    terms = RolloutTerms(canary_s=3.0, max_slowdown=2.0, grace_s=7.0, is_forced=is_forced)
    unused = cast("Any", None)

    async with serving_control(unused, cast("Any", rollouts), unused, tmp_path, stop=lambda: None):
        with pytest.raises(EngineFault, match="the canary is bad"):
            await asyncio.to_thread(lambda: list(rollout(tmp_path, CONFIG, terms)))

    assert rollouts.asked == [(CONFIG, terms)]
    assert "change failed: the canary is bad" in caplog.text  # in case the caller has disconnected
