from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from router.weighted_histogram import WeightedHistogram


def test_weighted_histogram_is_exported_as_one_that_takes_its_values_one_by_one() -> None:
    bounds = (0.01, 0.1, 1.0)
    weighted, plain = CollectorRegistry(), CollectorRegistry()
    histogram = WeightedHistogram("gap_seconds", "Gaps", buckets=bounds)
    weighted.register(histogram)
    one_by_one = Histogram("gap_seconds", "Gaps", buckets=bounds, registry=plain)

    for value, count in ((0.25, 3), (0.01, 2), (0.5, 1), (4.0, 5)):
        histogram.observe(value, count)
        for _ in range(count):
            one_by_one.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    assert lines(weighted) == lines(plain)
