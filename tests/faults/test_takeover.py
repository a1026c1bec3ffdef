"""Masters that die while one takes over from another, at every step of it: the next one has all that was acknowledged."""

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Final

import pytest

from kvstore.testing.transfer.awaited import eventually
from tests.faults.fail_points import Controlled
from tests.faults.points import of
from tests.system.running import System
from tests.system.test_standby import LEASE, MASTERS, Load, await_owner, finds_all


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, etcd_url: str) -> Iterator[tuple[System, list[Controlled]]]:
    """Three masters on one etcd, one of which owns the catalog, and two nodes. A process that dies in a test is
    restarted at its end."""
    folder = tmp_path_factory.mktemp("standing")
    with System(folder, f"{etcd_url}/{uuid.uuid4()}", masters=MASTERS) as system:
        points = [Controlled(folder / f"points-{index}") for index in range(MASTERS)]
        system.master_module = "tests.faults.daemon"
        for index in range(MASTERS):
            system.environments[f"master-{index}"] = points[index].environment
        system.start_masters(*LEASE)
        system.start_nodes("--dram", "32MiB")
        yield system, points


# Each takes the time of two leases. The point before a step is the point after the previous step, except for the first.
POINTS: Final = ["master.takeover.listed.before", *(point for point in of("master", "takeover", "register") if point.endswith(".after"))]


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.parametrize("point", POINTS)
def test_who_dies_while_it_takes_over_leaves_all_to_the_next(standing: tuple[System, list[Controlled]], point: str) -> None:
    system, points = standing
    owner = await_owner(system, *range(MASTERS))
    others = [index for index in range(MASTERS) if index != owner]
    with system.client() as client:
        load = Load(client)
        load.goes_on()
        for index in others:
            points[index].arm(f"{point}=kill")
            eventually(lambda index=index: points[index].is_armed or bool(points[index].struck), "it is armed")  # type: ignore[misc]
        os.kill(system.masters[owner].pid, signal.SIGKILL)
        eventually(lambda: any(points[index].struck for index in others), f"{point} is passed")
        for index in others:
            points[index].disarm()
        eventually(lambda: all(points[index].is_armed or points[index].struck for index in others), "nothing strikes any more")
        for index in range(MASTERS):
            if index == owner or points[index].struck:
                system.masters[index].kill()
                system.start_master(index, *LEASE)
        await_owner(system, *range(MASTERS))
        system.await_alive("n0", "n1")
        load.goes_on()
        finds_all(system, load)
