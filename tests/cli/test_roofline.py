from tests.cli.conftest import Run
from tests.cli.test_explain import cells


def test_roofline_holds_fitted_and_measured_steps_against_the_bounds_of_the_device(run: Run, address: str) -> None:
    result = run("roofline", "-a", address)
    assert result.exit_code == 0
    headline, links, *lines = result.stdout.splitlines()
    assert headline == (
        "prefill-0: memory 1.0 GB/s, arithmetic 1.00 TFLOP/s, weights 95 MiB, KV 1.0 KiB a token;"
        " above 100.0 rows a step is bound by arithmetic"
    )
    assert links == (
        "KV pulled by shm 8 GB/s between pages of this host, 6 GB/s from decode-1 (12 pulls);"
        " grpc 2 GB/s between pages of this host"
    )
    rows = {cells(line)[0]: cells(line)[1:] for line in lines if "│" in line}
    assert rows["decode 1, 1024 tokens each"] == ["101 ms", "1.0 ms", "memory", "200 ms", "51%"]
    assert rows["decode, mean of 10 measured"] == ["200 ms", "50.0 ms", "memory", "400 ms", "50%"]
    assert "prefill" not in " ".join(rows)  # its model is a guess
