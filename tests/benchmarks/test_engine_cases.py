"""How rates are read off token times, what a case could reach at best, and the summary over rounds."""

from collections.abc import Sequence

import pytest

from benchmarks.engine.cases import CASES, Case, Rate, best_tokens_per_s, choose_cases, decode_rate
from benchmarks.engine.goals import GOALS, TOKENS_PER_S, judge
from benchmarks.engine.measure import RATES, TURNS, common_prefix, spinning_arms
from benchmarks.figures import Figures
from benchmarks.peers.protocol import Output
from engine.work import DeviceRates, ModelShape

MODEL = ModelShape(
    num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=4, vocab_size=5
)
SLOW_MEMORY = DeviceRates(read_bytes_per_s=100.0, flops_per_s=1e9)
SLOW_CORES = DeviceRates(read_bytes_per_s=1e9, flops_per_s=100.0)


def make_output(*times_s: float) -> Output:
    return Output(token_ids=[0] * len(times_s), times_s=list(times_s))


def make_case(rate: Rate, *, num_requests: int = 2, prompt_tokens: int = 10, output_tokens: int = 4) -> Case:
    return Case(
        name="case", rate=rate, num_requests=num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


def test_decode_rate_of_one_sequence_is_its_steps_over_their_time() -> None:
    assert decode_rate([make_output(5.0, 5.5, 6.0, 6.5)]) == pytest.approx(2.0)


def test_decode_rate_when_prompts_were_read_in_two_steps_counts_only_full_steps() -> None:
    early = make_output(1.0, 2.0, 2.5, 3.0, 3.5)  # slow while the other's prompt is read
    late = make_output(2.0, 2.5, 3.0, 3.5, 3.6)  # alone and fast at the end

    assert decode_rate([early, late]) == pytest.approx(2 / 0.5)


def test_decode_rate_counts_every_step_when_its_tokens_come_one_by_one() -> None:
    first = make_output(*(step + 0.000 for step in range(5)))
    second = make_output(*(step + 0.002 for step in range(5)))

    assert decode_rate([first, second]) == pytest.approx(2.0)


def test_prefill_rate_ends_with_the_last_first_token() -> None:
    case = make_case(Rate.PREFILL, output_tokens=1)

    assert case.tokens_per_s([make_output(0.5), make_output(2.0)]) == pytest.approx(20 / 2.0)


def test_mixed_rate_ends_with_the_last_token() -> None:
    case = make_case(Rate.MIXED, output_tokens=2)

    assert case.tokens_per_s([make_output(0.5, 1.0), make_output(0.6, 4.0)]) == pytest.approx(4 / 4.0)


def test_cases_are_chosen_by_their_whole_name_or_by_words_in_it() -> None:
    assert choose_cases([]) == CASES
    assert [case.name for case in choose_cases(["decode 1"])] == ["decode 1"]
    assert [case.name for case in choose_cases(["at 8k", "mixed"])] == ["decode 1 at 8k", "mixed 16"]


def test_choose_cases_when_a_word_fits_nothing_names_it_and_the_cases() -> None:
    with pytest.raises(ValueError, match=r"'decod3'; there are decode 1, decode 8"):
        choose_cases(["prefill", "decod3"])


@pytest.mark.parametrize(("a", "b", "shared"), [([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([4], [5], 0)])
def test_common_prefix_counts_until_the_first_difference(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(a, b) == shared


def test_decode_at_best_reads_weights_and_context_once_a_step() -> None:
    case = make_case(Rate.DECODE)

    # 2 requests with 12 tokens of context each; weights of 40 + 10 values, KV of 4, 2 bytes each.
    assert best_tokens_per_s(case, MODEL, SLOW_MEMORY) == pytest.approx(2 * 100.0 / (2 * 50 + 2 * 12 * 8))


def test_prefill_at_best_counts_causal_pairs_and_one_row_through_the_head() -> None:
    case = make_case(Rate.PREFILL, num_requests=3, prompt_tokens=4, output_tokens=1)

    flops = 2 * 40 * 12 + 2 * 10 + 8 * 3 * (1 + 2 + 3 + 4)
    assert best_tokens_per_s(case, MODEL, SLOW_CORES) == pytest.approx(12 * 100.0 / flops)


def test_mixed_at_best_is_the_prompts_and_then_the_steps_behind_the_first_token() -> None:
    case = make_case(Rate.MIXED)
    prefill_s = (2 * 40 * 20 + 2 * 10 + 8 * 2 * 55) / 100.0
    step_s = (2 * 2 * 50 + 8 * 2 * 12) / 100.0

    assert best_tokens_per_s(case, MODEL, SLOW_CORES) == pytest.approx(8 / (prefill_s + 3 * step_s))


def test_spinning_arms_when_the_waiting_one_used_a_core_says_who_was_disturbed() -> None:
    figures = Figures()
    for arm, waiting_cpu_s in (("a", 0.5), ("b", 0.01)):
        figures.add(TURNS, "case", arm, total_s=1.0, CPU_s_of_waiting_arms=waiting_cpu_s)

    (sentence,) = spinning_arms(figures)

    assert sentence.startswith("while a computed, the waiting arm used 50% of a core")


def measured(case: str, **rates: Sequence[float]) -> Figures:
    figures = Figures()
    for arm, values in rates.items():
        for value in values:
            figures.add(RATES, case, arm.replace("_", " ").replace("q4 0", "q4_0"), **{TOKENS_PER_S: value})
    return figures


def test_goals_are_judged_by_the_median_of_the_rounds_ratios() -> None:
    figures = measured("decode 1", kvrelay=[100, 50, 100], kvrelay_int8=[160, 60, 140], kvrelay_int4=[190, 101, 210])

    judged = {(each.goal.arm, each.goal.base): (each.rounds, each.is_met) for each in judge(figures)}

    assert judged == {
        ("kvrelay int8", "kvrelay"): ([1.6, 1.2, 1.4], False),
        ("kvrelay int4", "kvrelay"): ([1.9, 2.02, 2.1], True),
    }


def test_goals_name_cases_that_exist() -> None:
    assert {goal.case for goal in GOALS} <= {case.name for case in CASES}
