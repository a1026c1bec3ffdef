"""Promises of histogram.py."""

from kvstore.telemetry.metrics.histogram import BOUNDS_S, Counts, Histogram, Histograms, sum_of


def test_a_measurement_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((0.001, 0.01))
    for elapsed_ns in (0, 1_000_000, 1_000_001, 10_000_000, 10_000_001):
        histogram.observe(elapsed_ns)
    assert histogram.counts() == Counts((0.001, 0.01), (2, 2, 1), 0.022000002)


def test_one_measurement_may_stand_for_several() -> None:
    histogram = Histogram()
    histogram.observe(3_000, times=61)
    counts = histogram.counts()
    assert counts.counts[BOUNDS_S.index(5e-6)] == sum(counts.counts) == 61
    assert counts.sum_s == 61 * 3e-6


def test_there_is_one_for_each_name() -> None:
    histograms = Histograms()
    assert histograms.read() == {}
    histograms.observe("get", 5)
    histograms.observe("get", 5)
    histograms.observe("put", 5, times=3)
    assert {name: sum(counts.counts) for name, counts in histograms.read().items()} == {("get",): 2, ("put",): 3}


def test_histograms_of_the_same_bounds_come_to_their_sum() -> None:
    one, two = Histogram(), Histogram()
    one.observe(3_000)
    two.observe(3_000, times=2)
    two.observe(10**12)
    assert sum_of([one.counts()]) == one.counts()
    whole = sum_of([one.counts(), two.counts()])
    assert (whole.counts[BOUNDS_S.index(5e-6)], whole.counts[-1], round(whole.sum_s, 9)) == (3, 1, 1000.000009)
