"""Promises of scenario.py."""

from itertools import islice
from typing import Any

import pytest

from kvstore.kvcache.traces.named import generate
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.request import Reason, Slo
from kvstore.scheduler.simulator.plan import Plan
from kvstore.scheduler.simulator.simulation import Scenario
from tests.scheduler.simulator.parts import asked

TRACE = [asked(100 * number, [0, number + 1], output=20) for number in range(20)]


def test_names_make_a_machine() -> None:
    machine = Scenario().machine()
    assert (machine.layers, machine.kv_bytes_per_token) == (80, 327_680)
    assert (machine.send_bytes_per_s, machine.load_bytes_per_s, machine.peak_flops_per_s) == (100e9, 200e9, 8 * 312e12)
    assert Scenario(send_bytes_per_s=5e9).machine().send_bytes_per_s == 5e9


def test_algorithm_1_rejects_by_the_slo_only_where_nothing_else_decides() -> None:
    impossible = Plan(slo=Slo(1e-6, 1e-6))
    assert Scenario(plan=impossible).run(TRACE).rejected == {Reason.TTFT.value: 20}
    free = Scenario(plan=impossible, admission="all").run(TRACE)
    assert (free.rejected, free.in_time) == ({}, 0)
    assert Scenario(plan=impossible, admission="late").run(TRACE).rejected == {Reason.PREFILL_LOAD.value: 20}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": "none"}, ConfigError, "none"),
        ({"gpu": "none"}, ConfigError, "none"),
        ({"gpus": 1}, ConfigError, "does not fit on 1 x A800"),
        ({"dispatcher": "none"}, ConfigError, "none"),
        ({"admission": "none"}, ConfigError, "no admission is named 'none': take one of slo, all, late"),
        ({"plan": Plan(policy="none")}, ConfigError, "none"),
        ({"threshold": 0.5}, InvalidArgument, "at least 1"),
        ({"send_bytes_per_s": 0.0}, InvalidArgument, "send_bytes_per_s is 0"),
    ],
)
def test_what_is_not_known_is_said_before_anything_runs(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Scenario(**changed).simulation()


@pytest.mark.no_cover
def test_what_knows_more_answers_sooner() -> None:
    """The order of the published comparison, on conversations with the statistics of its trace."""
    requests = list(islice(generate(seed=1), 1200))
    plan = Plan(prefill=8, decode=8, cache_blocks=2880, rate=1.2)
    names = ("kvcache_centric", "local_cache_aware", "load_balancing", "random")
    means_s = [Scenario(plan=plan, dispatcher=name).run(requests).ttft.mean_s for name in names]
    assert means_s == sorted(means_s)
    assert means_s[-1] > 4 * means_s[0]
