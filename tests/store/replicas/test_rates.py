"""Promises of rates.py: the newest of each source, of so many sources."""

from kvstore.protocol.message import MAX_RATES
from kvstore.store.replicas.rates import SourceRates
from kvstore.transfer.paths.path_chooser import Measured

S = 1_000_000_000


def test_the_newest_measurement_of_each_source_is_told_with_its_age() -> None:
    rates = SourceRates()
    assert rates.told(0) == []
    rates.note(3, Measured(1e9, 1 << 20, 2 * S))
    rates.note(3, None)
    rates.note(3, Measured(2e9, 1 << 21, 4 * S))
    (told,) = rates.told(7 * S)
    assert (told.node_id, told.bytes_per_s, told.basis_bytes, told.age_s) == (3, 2e9, 1 << 21, 3.0)
    assert rates.told(0)[0].age_s == 0, "measured since the look"


def test_of_many_sources_those_measured_last_are_told() -> None:
    rates = SourceRates()
    for node_id in range(MAX_RATES):
        rates.note(node_id, Measured(1e9, 1 << 20, 0))
    rates.note(0, Measured(1e9, 1 << 20, 0))
    rates.note(MAX_RATES, Measured(1e9, 1 << 20, 0))
    assert sorted(rate.node_id for rate in rates.told(0)) == [0, *range(2, MAX_RATES + 1)]
