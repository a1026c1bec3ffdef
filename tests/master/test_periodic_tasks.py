"""Tests of periodic_tasks.py: several masters reach even shares of the partitions, and operators' settings apply at
all of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.master.leadership.role_manager import MasterRole
from kvstore.master.status import role_in
from kvstore.protocol import control_pb2 as pb
from kvstore.testing.transfer.awaited import eventually
from tests.master.running import TIMEOUT_S, Places, master_in_thread


@pytest.fixture
def pair(tmp_path: Path, etcd_url: str, request: pytest.FixtureRequest) -> Iterator[list[Places]]:
    """The first owns all two partitions when the second comes."""
    settings: dict[str, Any] = {"catalog": f"{etcd_url}/{request.node.name}", "partitions": 2, "node_ttl_s": 60.0, "lease_ttl_s": 20.0}
    settings |= {"share_settle_s": 0.05, "share_pause_s": 0.05}
    with ExitStack() as stack:
        first = stack.enter_context(master_in_thread(tmp_path / "a", **settings))
        assert owned(first) == {0, 1}
        yield [first, stack.enter_context(master_in_thread(tmp_path / "b", **settings))]


def owned(places: Places) -> set[int]:
    master = places.master
    assert master is not None

    def look() -> set[int]:
        return {partition.index for partition in master.partitions if role_in(partition).role is MasterRole.OWNER}

    return master.reactor.call(look, deadline_s=TIMEOUT_S)


def test_who_has_more_than_its_share_gives_it_up(pair: list[Places]) -> None:
    eventually(lambda: sorted(map(len, map(owned, pair))) == [1, 1], "each owns one")
    assert owned(pair[0]) | owned(pair[1]) == {0, 1}


def test_operator_quotas_apply_at_other_partitions(pair: list[Places]) -> None:
    eventually(lambda: sorted(map(len, map(owned, pair))) == [1, 1], "each owns one")
    [first] = [places for places in pair if 0 in owned(places)]
    [other] = [places for places in pair if 1 in owned(places)]
    with first.stub() as stub:
        stub.SetQuota(pb.SetQuotaRequest(tenant="red", limits={"pins": 7}), timeout=TIMEOUT_S)

    def pins() -> int | None:
        assert other.master is not None
        return other.master._quotas.now.of("red").pins

    eventually(lambda: pins() == 7, "the other master goes by it")
