"""Promises of rates.py."""

import pytest

from kvstore.console.rates import MAX_SPAN_S, FlowRates, RateTracker
from kvstore.protocol import control_pb2 as pb


def test_rate_is_counter_growth_between_heartbeats() -> None:
    rates = RateTracker()
    assert rates.of("a", at_s=10.0, epoch=1, counters={"hits": 100}) == {}
    assert rates.of("a", at_s=12.0, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 30, "new": 2}
    assert rates.of("a", at_s=12.001, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 30, "new": 2}, "the same heartbeat"
    assert rates.of("a", at_s=12.2, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 30, "new": 2}, "the same, told slowly"
    assert rates.of("a", at_s=13.0, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 0, "new": 0}
    assert rates.of("a", at_s=13.1, epoch=1, counters={"hits": 161, "new": 4}) == {"hits": pytest.approx(10), "new": 0}


def test_rates_restart_on_counter_reset_and_registration() -> None:
    rates = RateTracker()
    rates.of("a", at_s=1, epoch=1, counters={"hits": 100})
    assert rates.of("a", at_s=2, epoch=1, counters={"hits": 7}) == {"hits": 7}
    assert rates.of("a", at_s=3, epoch=2, counters={"hits": 50}) == {}


def test_who_is_gone_is_forgotten() -> None:
    rates = RateTracker()
    rates.of("a", at_s=1, epoch=1, counters={"hits": 1})
    rates.of("b", at_s=1, epoch=1, counters={"hits": 1})
    rates.keep(["b", "c"])
    assert rates.of("a", at_s=2, epoch=1, counters={"hits": 5}) == {}
    assert rates.of("b", at_s=2, epoch=1, counters={"hits": 5}) == {"hits": 4}


def told(in_bytes: int, *, name: str = "n", age_s: float = 0.0, state: str = "alive", **others: int) -> pb.NodeTopology:
    links = [pb.LinkFlow(device="mlx5_0", in_bytes=in_bytes, out_bytes=2 * in_bytes, **others)]
    return pb.NodeTopology(name=name, state=state, links=links, links_age_s=age_s)


@pytest.mark.promise("observable")
def test_rates_do_not_depend_on_polling() -> None:
    flows = FlowRates()
    assert flows.of([told(1000)], 10.0) == [{"node": "n", "links": {}}]
    expected = {"mlx5_0": {"in_bytes_per_s": 500.0, "out_bytes_per_s": 1000.0, "transfer_bytes_per_s": 50.0}}
    assert flows.of([told(2000, age_s=1.0, transfer_bytes=100)], 13.0) == [{"node": "n", "links": expected}]
    assert flows.of([told(2000, age_s=2.0, transfer_bytes=100)], 14.0) == [{"node": "n", "links": expected}], "the same heartbeat"


def test_flow_rates_restart_after_a_gap() -> None:
    flows = FlowRates()
    flows.of([told(0), told(0, name="m")], 0.0)
    assert flows.of([told(500)], 5.0)[0]["links"]["mlx5_0"]["in_bytes_per_s"] == 100.0
    assert flows.of([told(1000), told(1000, name="m")], 10.0)[1] == {"node": "m", "links": {}}
    assert flows.of([told(9000)], 11.0 + MAX_SPAN_S) == [{"node": "n", "links": {}}]
    assert flows.of([told(9100)], 12.0 + MAX_SPAN_S)[0]["links"]["mlx5_0"]["in_bytes_per_s"] == 100.0


def test_nothing_flows_at_a_node_that_is_dead() -> None:
    flows = FlowRates()
    flows.of([told(0)], 0.0)
    assert flows.of([told(500, state="dead")], 5.0) == [{"node": "n", "links": {}}]
