"""Values split at random are read as they were put, into any buffers: through shared memory, by messages over TCP, by
the transfer engine, and from NVMe."""

import itertools
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from tests.client.processes import Cluster, cluster

_serial = itertools.count()
WAYS = {
    "shared memory": lambda address: Client(address, deadline_s=60),
    "messages": lambda address: Client(address, deadline_s=60, transfer=TransferSettings(transports="tcp")),
    "transfer engine": lambda address: Client(
        address, deadline_s=60, settings=ClientSettings(engine_min_bytes=Size(1)), transfer=TransferSettings(transports="tcp")
    ),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        nvme = f"{tmp_path_factory.mktemp('nvme')}:256MiB"
        started.start_node("--dram", "64MiB", "--nvme", nvme, "--demotion-wait-s", "60")  # else a busy disk drops what is to go there
        yield started


@pytest.fixture(scope="module")
def deep(running: Cluster) -> dict[str, tuple[list[bytes], "np.ndarray[Any, np.dtype[np.uint8]]"]]:
    """For each way keys and values that are in NVMe alone."""
    found = {way: ([b"%s %d" % (way.encode(), i) for i in range(4)], np.frombuffer(os.urandom(400_000), np.uint8)) for way in WAYS}
    every = [key for keys, _ in found.values() for key in keys]
    with Client(running.address, deadline_s=60) as client:
        for keys, values in found.values():
            client.put_batch_from(keys, [[value[:70_001], value[70_001:]] for value in values.reshape(4, -1)])

        def is_deep() -> bool:
            client.put_batch([os.urandom(16) for _ in range(50)], [b"v" * 100_000] * 50)
            client.flush(deadline_s=60)
            return [[place.tiers for place in places] for places in client.locate(every)] == [[("nvme",)]] * len(every)

        eventually(is_deep, "more than DRAM holds: they went down to NVMe")
    return {way: (keys, values.reshape(4, -1)) for way, (keys, values) in found.items()}


@pytest.mark.promise("value-layouts")
@pytest.mark.parametrize("way", WAYS)
def test_values_in_nvme_are_read_into_their_parts(running: Cluster, deep: dict[str, Any], way: str) -> None:
    keys, values = deep[way]
    into = np.zeros_like(values)
    with WAYS[way](running.address) as client:
        assert client.get_ranges_into(keys[:1], [70_000], [into[0, :5]]) == [5]
        assert np.array_equal(into[0, :5], values[0, 70_000:70_005])
        assert client.get_each_into(keys, [[room[:1], room[1:50_000], room[50_000:]] for room in into]) == [100_000] * 4
    assert np.array_equal(into, values)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A value's size, and where it is cut as it is put and as it is read."""
    size = draw(st.integers(1, 300_000))
    places = st.lists(st.integers(0, size), max_size=12).map(lambda found: [0, *sorted(found), size])
    return size, draw(places), draw(places)


@pytest.mark.promise("value-layouts")
@pytest.mark.parametrize("way", WAYS)
@hypothesis_settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(cuts(), min_size=1, max_size=30))
def test_values_cut_at_random_are_got_as_they_were_put(running: Cluster, way: str, shapes: list[tuple[int, list[int], list[int]]]) -> None:
    values = [os.urandom(size) for size, _, _ in shapes]
    keys = [b"cut %d" % next(_serial) for _ in shapes]
    rooms = [bytearray(size) for size, _, _ in shapes]
    put = [[memoryview(value)[a:b] for a, b in pairwise(at)] for value, (_, at, _) in zip(values, shapes, strict=True)]
    got = [[memoryview(room)[a:b] for a, b in pairwise(at)] for room, (_, _, at) in zip(rooms, shapes, strict=True)]
    with WAYS[way](running.address) as client:
        assert client.put_batch_from(keys, put, ack="cluster") == [True] * len(keys)
        assert client.get_batch_into(keys, got) == [len(value) for value in values]
        assert rooms == values
        if way == "transfer engine" and max(map(len, values)) > ClientSettings().get_inline_bytes:
            assert client.stats().engine_bytes > 0
