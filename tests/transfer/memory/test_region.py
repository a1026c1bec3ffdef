"""Promises of region.py: memory is held while it is used, and peers reach what their keys open."""

import signal
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, Denied, InvalidArgument, KVStoreError, StaleHandle
from kvstore.protocol.transfers import ReadRegions, WriteRegions
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, eventually, in_background, is_quiet, within
from kvstore.transfer.memory import region as location
from kvstore.transfer.memory.region import ANYWHERE, Exports, PlainRegion, Region, location_of, node_of
from kvstore.transfer.memory.signal_safety import Shield
from tests.rpc.raw_peers import Columns, fetch, make_region, shown, store


def nodes(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
    return folder


@pytest.fixture(autouse=True)
def counted_anew() -> None:
    location._count_nodes.cache_clear()


def test_node_of_returns_a_node_of_this_host_or_none() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    found = node_of(memory.ctypes.data)
    assert found is None or Path(f"/sys/devices/system/node/node{found}").exists()


def test_location_of_asks_the_kernel_only_with_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    monkeypatch.setattr(location, "node_of", lambda address: 7 if address == memory.ctypes.data else None)
    monkeypatch.setattr(location, "_NODES", nodes(tmp_path, "node0", "possible"))
    assert location_of(memory.ctypes.data) == ANYWHERE
    location._count_nodes.cache_clear()
    nodes(tmp_path, "node1")
    assert location_of(memory.ctypes.data) == "cpu:7"
    assert location_of(1) == ANYWHERE
    location._count_nodes.cache_clear()


@pytest.fixture
def exports() -> Exports:
    return Exports()


@pytest.fixture
def region(exports: Exports) -> Region:
    region = make_region(100, bytes(range(100)))
    exports.add(region)
    return region


def refused(exports: Exports, region: Region, request: ReadRegions | WriteRegions) -> KVStoreError:
    with pytest.raises(KVStoreError) as caught:
        exports.hold(request)
    assert region.users == 0
    return caught.value


def test_a_wrong_key_is_denied_beside_a_right_one(exports: Exports, region: Region) -> None:
    right, wrong = shown(region), shown(region)._replace(key=region.write_key ^ 1)
    columns: Columns = [(right, 0, 1), (wrong, 0, 1)]
    assert isinstance(refused(exports, region, fetch(columns)), Denied)
    assert isinstance(refused(exports, region, store(columns)), Denied)
    assert isinstance(refused(exports, region, store([(shown(region, writable=False), 0, 1)])), Denied)


def test_memory_that_cannot_be_written_is_not(exports: Exports) -> None:
    region = Region(memoryview(b"constant"))
    exports.add(region)
    assert isinstance(refused(exports, region, store([(shown(region), 0, 1)])), Denied)
    assert bytes(exports.hold(fetch([(shown(region), 0, 8)]))[0][0]) == b"constant"


@pytest.mark.parametrize(("offset", "size"), [(0, 101), (100, 1), (2**64 - 1, 1), (1, 2**64 - 1)])
def test_bytes_outside_the_region_are_refused(exports: Exports, region: Region, offset: int, size: int) -> None:
    assert isinstance(refused(exports, region, fetch([(shown(region), 0, 1), (shown(region), offset, size)])), InvalidArgument)


def test_a_closed_or_unexported_region_is_stale(exports: Exports, region: Region) -> None:
    request = fetch([(shown(region), 0, 1)])
    region.hold()
    with pytest.raises(TimeoutError):
        region.close(deadline_s=0.01)
    with pytest.raises(StaleHandle):
        exports.hold(request)
    region.release()
    region.close()
    assert isinstance(refused(exports, region, request), StaleHandle)
    assert isinstance(refused(exports, region, fetch([(shown(make_region(1)), 0, 1)])), StaleHandle)
    assert not exports._regions


def numbered_region(size_bytes: int = 100) -> Region:
    return Region(memoryview(bytearray(range(size_bytes))))


@pytest.mark.parametrize(
    "memory",
    [memoryview(b""), memoryview(array("Q", [1])), memoryview(bytearray(8)).cast("B", (2, 4)), memoryview(bytearray(8))[::2]],
    ids=["empty", "not bytes", "not flat", "with gaps"],
)
def test_memory_that_is_not_flat_bytes_is_refused(memory: memoryview) -> None:
    with pytest.raises(InvalidArgument):
        Region(memory)


def test_close_waits_for_the_last_user_and_refuses_new_ones() -> None:
    region = numbered_region()
    region.hold()
    region.hold()
    closing = in_background(region.close)
    assert is_quiet(closing)
    assert region.is_closed
    with pytest.raises(Closed):
        region.hold()
    region.release()
    assert is_quiet(closing)
    region.release()
    closing.result(PATIENCE_S)


def test_close_gives_up_at_its_deadline_and_can_be_called_again() -> None:
    region, closed = numbered_region(), list[Region]()
    region.on_close(closed.append)
    region.hold()
    with within(SHORT_S), pytest.raises(DeadlineExceeded, match="1 transfers"):
        region.close(deadline_s=SHORT_S)
    assert not closed
    region.release()
    region.close()
    region.close()
    assert closed == [region]


def test_close_interrupted_by_a_signal_can_be_repeated() -> None:
    region = Region(memoryview(bytearray(4)))
    closed: list[Region] = []
    region.on_close(closed.append)
    region.hold()

    class Struck(Exception):
        pass

    def strike(number: int, frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        main = threading.main_thread().ident
        assert main is not None

        def strike_the_waiter() -> None:
            eventually(lambda: region.is_closed, "it waits")
            signal.pthread_kill(main, signal.SIGUSR1)

        in_background(strike_the_waiter)
        with within(0), pytest.raises(Struck):
            region.close(deadline_s=PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not closed
    region._wake()  # by the signal's own thread, possibly late
    region.release()
    region.close()
    assert closed == [region]


def test_a_deferred_exception_does_not_interrupt_a_plain_region() -> None:
    """The transfer would then never complete."""

    class Struck(BaseException):
        pass

    def strike(number: int, frame: object) -> None:
        raise Struck

    region, ended = PlainRegion(memoryview(bytearray(4))), []
    region.hold()
    region.on_close(lambda _: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(Struck), Shield():
            region.release()
            ended.append(region.is_closed)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == [True]
