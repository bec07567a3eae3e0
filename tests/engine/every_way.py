"""An engine's answers by every way on which they may come about."""

from dataclasses import replace
from typing import Any

from common.ids import RequestId
from engine.events import Started
from engine.executor import Executor
from tests.builders import BLOCK_SIZE, assert_empty, core_on, make_request, run_until_idle, served, submit
from tests.engine.tiny_models import make_prompt, reference_tokens


def assert_answers_are_those_of_transformers(reference: Any, executor: Executor, *, num_tokens: int) -> None:
    """Compare answers in a batch, preempted, cached, and resumed behind every token. The executor has 20 blocks."""
    core = core_on(executor, max_step_tokens=16)
    requests = [
        replace(
            make_request(make_prompt(5 * BLOCK_SIZE + 1, seed=i), max_tokens=num_tokens),
            request_id=RequestId(f"req-{i}"),
        )
        for i in range(4)
    ]
    collectors = [submit(core, request)[1] for request in requests]
    run_until_idle(core)
    assert core.load().num_preemptions > 0
    prompts = [list(request.prompt_token_ids) for request in requests]
    for prompt, collector in zip(prompts, collectors, strict=True):
        answer = collector.token_ids()
        assert answer == reference_tokens(reference, prompt, num_tokens, guess=answer)
    again = served(core, requests[-1])
    assert again.token_ids() == answer
    assert [e.num_cached_tokens for e in again.events if isinstance(e, Started)] == [5 * BLOCK_SIZE]
    for num_done in range(1, num_tokens):
        resumed = make_request(prompts[-1], output=answer[:num_done], max_tokens=num_tokens, salt=str(num_done))
        assert served(core, resumed).token_ids() == answer[num_done:]
    assert_empty(core)
