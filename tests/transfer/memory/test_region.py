"""Registered memory: what a region refuses, who holds it, and that it is not closed under a transfer."""

import signal
import threading
from array import array

import numpy as np
import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, InvalidArgument
from kvstore.transfer.memory.location import location_of
from kvstore.transfer.memory.region import PlainRegion, Region, RemoteRegion, on_rail
from kvstore.transfer.memory.signal_safety import Shield
from kvstore.transfer.testing.waiting import PATIENCE_S, SHORT_S, eventually, in_background, is_quiet, within


def make_region(size_bytes: int = 100) -> Region:
    return Region(memoryview(bytearray(range(size_bytes))))


@pytest.mark.parametrize(
    "memory",
    [memoryview(b""), memoryview(array("Q", [1])), memoryview(bytearray(8)).cast("B", (2, 4)), memoryview(bytearray(8))[::2]],
    ids=["empty", "not bytes", "not flat", "with gaps"],
)
def test_memory_that_is_not_flat_bytes_is_refused(memory: memoryview) -> None:
    with pytest.raises(InvalidArgument):
        Region(memory)


def test_a_region_knows_where_its_memory_is() -> None:
    array = np.zeros(64, np.uint8)
    region = Region(memoryview(array), location="cpu:1", fd=5)  # type: ignore[arg-type]
    assert (region.address, region.size_bytes, region.location, region.fd) == (array.ctypes.data, 64, "cpu:1", 5)


def test_ids_and_keys_are_a_regions_own_and_stay() -> None:
    one, other = make_region(), make_region()
    assert one.region_id != other.region_id
    assert len({one.read_key, one.write_key, other.read_key, other.write_key}) == 4
    assert (one.read_key, one.write_key) == (one.read_key, one.write_key)


def test_a_part_is_a_view() -> None:
    region = make_region()
    region.part(10, 3)[:] = b"abc"
    assert bytes(region.memory[9:14]) == b"\x09abc\x0d"
    assert len(region.part(0, 100)) == 100
    assert len(region.part(100, 0)) == 0


@pytest.mark.parametrize(("offset", "size"), [(-1, 5), (0, 101), (100, 1), (5, -1), (2**64, 1)])
def test_a_part_outside_the_region_is_refused(offset: int, size: int) -> None:
    with pytest.raises(InvalidArgument):
        make_region().part(offset, size)


def test_users_are_counted() -> None:
    region = make_region()
    region.hold()
    region.hold()
    assert region.users == 2
    region.release()
    region.release()
    assert region.users == 0
    with pytest.raises(AssertionError):
        region.release()


def test_close_waits_for_the_last_user_and_refuses_new_ones() -> None:
    region = make_region()
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
    region, closed = make_region(), list[Region]()
    region.on_close(closed.append)
    region.hold()
    with within(SHORT_S), pytest.raises(DeadlineExceeded, match="1 transfers"):
        region.close(deadline_s=SHORT_S)
    assert not closed
    region.release()
    region.close()
    region.close()
    assert closed == [region]


def test_a_plain_region_closes_with_its_last_user() -> None:
    region = PlainRegion(memoryview(bytearray(4)))
    closed: list[Region] = []
    region.on_close(closed.append)
    region.hold()
    region.hold()
    region.release()
    assert not closed
    region.release()
    assert closed == [region]


def test_a_close_that_is_struck_by_a_signal_handler_raises_at_once_and_may_be_called_again() -> None:
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
    region._wake()  # by the signal's own thread, which may come late
    region.release()
    region.close()
    assert closed == [region]


def test_a_rail_is_reached_by_what_its_agent_said_or_all_of_its_transport() -> None:
    region = RemoteRegion(1, 10, 7, {"tcp": b"", on_rail("rdma", "a"): b"A", on_rail("rdma", ""): b"any"})
    assert region.descriptor("tcp", "a") == region.descriptor("tcp", "b") == b""
    assert (region.descriptor("rdma", "a"), region.descriptor("rdma", ""), region.descriptor("rdma", "b")) == (b"A", b"any", None)
    assert region.by_rail("rdma", "a") == RemoteRegion(1, 10, 7, {"rdma": b"A"})
    assert region.by_rail("tcp", "b").descriptors == {"tcp": b""}
    assert region.by_rail("rdma", "b").descriptors == {}


def test_a_region_says_where_it_lies_named_or_asked() -> None:
    memory = memoryview(bytearray(8))
    assert Region(memory, location="cpu:5").location == "cpu:5"
    region = Region(memory)
    assert region.location == location_of(region.address)


def test_the_end_of_a_plain_region_is_not_cut_short_by_what_a_shield_keeps() -> None:
    """It is the beginning of the end of its transfer, which nobody would hear of."""

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
