"""Promises of the engine between two hosts with several rails. `make bench-rails` measures the speed."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.namespaces import Cut, TwoHosts, two_hosts
from tests.transfer.paths.rails_child import CALLERS, Direction, Load, Look

RATES_GBIT_S = (1, 1, 2)
DEADLINE_S = 60.0
LOOK_INTERVAL_S = 0.02
QUICK = {"stall_timeout_s": 0.5, "connect_timeout_s": 0.5, "cooldown_s": 0.1, "cooldown_max_s": 0.5}
"""Rails are found out, and probed back, sooner than by default."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts(*RATES_GBIT_S) as found:
        yield found


def wait_for(load: Load, condition: Callable[[Look], bool]) -> Look:
    """The first look that fulfils it."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition(look := load.look()):
        assert not look.errors
        assert time.monotonic() < until_s, look
        threading.Event().wait(LOOK_INTERVAL_S)
    return look


def wait_for_all_rails(load: Load) -> None:
    """Until each has delivered something from now on."""
    before = load.look().delivered_bytes
    wait_for(load, lambda look: all(look.delivered_bytes[rail] > before[rail] for rail in before))


def wait_for_batches(load: Load) -> None:
    """Until so many have ended that at least half of them began after now."""
    wanted = load.look().batches + 2 * CALLERS
    wait_for(load, lambda look: look.batches >= wanted)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_rails_cut_and_restored_under_load_cause_no_errors(hosts: TwoHosts, direction: Direction) -> None:
    with Load(hosts, direction, **QUICK) as load:
        assert set(load.look().delivered_bytes) == {rail.device for rail in hosts.rails}
        wait_for_all_rails(load)
        for rail, kind in ((2, Cut.SILENT), (1, Cut.LINK_DOWN)):
            hosts.cut(rail, kind)
            wait_for_batches(load)
            hosts.restore(rail)
            wait_for_all_rails(load)
        last = load.close()
    assert not last.errors
    assert not last.wrong_blocks


@pytest.mark.slow
def test_with_all_rails_cut_callers_are_told_and_nothing_hangs(hosts: TwoHosts) -> None:
    with Load(hosts, "read", **QUICK) as load:
        wait_for_all_rails(load)
        for rail in range(len(hosts.rails)):
            hosts.cut(rail)
        until_s = time.monotonic() + DEADLINE_S
        while len((look := load.look()).errors) < CALLERS:
            assert time.monotonic() < until_s, look
            threading.Event().wait(LOOK_INTERVAL_S)
        last = load.close()
        for rail in range(len(hosts.rails)):
            hosts.restore(rail)
    assert all("Unreachable" in error for error in last.errors)
    assert not last.wrong_blocks
