"""Peers reach what was exported, with the right key, inside its bounds, until it is closed; and nothing is held after a refusal."""

import pytest

from kvstore.protocol.errors import Denied, InvalidArgument, KVStoreError, StaleHandle
from kvstore.protocol.transfers import Fetch, Store
from kvstore.transfer.memory.region import Exports, Region
from tests.rpc.raw_peers import Columns, fetch, make_region, shown, store


@pytest.fixture
def exports() -> Exports:
    return Exports()


@pytest.fixture
def region(exports: Exports) -> Region:
    region = make_region(100, bytes(range(100)))
    exports.add(region)
    return region


def test_the_read_key_lets_read_and_the_write_key_both(exports: Exports, region: Region) -> None:
    assert exports.find(region.region_id, region.read_key, writing=False) is region
    assert exports.find(region.region_id, region.write_key, writing=False) is region
    assert exports.find(region.region_id, region.write_key, writing=True) is region


def refused(exports: Exports, region: Region, request: Fetch | Store) -> KVStoreError:
    with pytest.raises(KVStoreError) as caught:
        exports.hold(request)
    assert region.users == 0
    return caught.value


def test_a_wrong_key_is_denied_though_another_piece_has_the_right_one(exports: Exports, region: Region) -> None:
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


def test_a_region_is_out_of_reach_once_it_is_closed_or_was_never_exported(exports: Exports, region: Region) -> None:
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
