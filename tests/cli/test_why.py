import json

from tests.cli.conftest import Run


def test_why_numbers_the_causes_with_what_they_cost_and_the_changes_that_help(run: Run, address: str) -> None:
    result = run("why", "--window", "60", "-a", address)
    assert result.exit_code == 0
    headline, *lines = result.stdout.splitlines()
    assert headline == "requests of 60 s"
    walls, findings = lines[:-3], lines[-3:]
    assert [line.split()[0] for line in walls if "1 min" in line] == ["prefill", "decode"]
    assert "waiting" in walls[-1]
    assert findings == [
        "1. prefill (1.5 s a request): prompts wait 1.5 s",
        "   - a prefill worker more: …",
        "2. decode (0.5 s a request): a gap is 20 ms",
    ]


def test_why_of_a_pool_leaves_the_other_out(run: Run, address: str) -> None:
    assert run("why", "--pool", "decode", "-a", address).stdout.splitlines()[-1:] == [
        "1. decode (0.5 s a request): a gap is 20 ms"
    ]
    assert "prefill" not in run("why", "--pool", "decode", "-a", address).stdout
    assert run("why", "--pool", "router", "-a", address).exit_code == 2


def test_why_of_a_request_lists_the_parts_of_its_time(run: Run, address: str) -> None:
    result = run("why", "--request", "req-7", "-a", address)
    assert result.stdout.splitlines() == ["req-7: 3 s in all", "1. prefill: 2 s, usually 0.1 s"]
    assert run("why", "--request", "req-7", "--pool", "decode", "-a", address).exit_code == 2


def test_why_as_json_has_every_figure(run: Run, address: str) -> None:
    diagnosis = json.loads(run("why", "--json", "-a", address).stdout)
    assert [finding["lost_s"] for finding in diagnosis["findings"]] == [1.5, 0.5]
