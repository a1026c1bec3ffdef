"""Tests of records.py."""

import itertools

import pytest

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Op
from kvstore.master.directory.records import (
    MAX_TENANT_BYTES,
    PART_BYTES,
    Description,
    DescriptionPart,
    DrainRecord,
    GrantedRecord,
    NodeRecord,
    PinRecord,
    RemovedRecord,
    StoppedRecord,
    TargetRecord,
    UnknownNodesRecord,
    Version,
    check_tenant,
    decode,
    delete_block,
    delete_drain,
    delete_node,
    delete_stopped,
    delete_target,
    join_description,
    pin,
    put_block,
    put_description,
    put_drain,
    put_granted,
    put_node,
    put_stopped,
    put_target,
    put_unknown_nodes,
    removed,
    tenant_prefix,
    unpin,
)
from kvstore.protocol.errors import Corrupt, InvalidArgument


def test_a_block_is_columns_of_one() -> None:
    one = Version(1, 2, 3, "space", b"parent")
    assert put_block("red", b"a", one, [7, 2]) == BlockPuts("red", [b"a"], (1,), (2,), (3,), ("space",), (b"parent",), ((2, 7),))
    assert delete_block("red", b"a") == BlockDeletes("red", (b"a",))


def test_records_of_the_largest_tenant_and_key_fit_the_catalog() -> None:
    assert len(pin(tenant_prefix("t" * MAX_TENANT_BYTES), bytes(255)).key) <= 400
    check_tenant("t" * 128)
    with pytest.raises(InvalidArgument, match="128"):
        check_tenant("t" * 129)
    with pytest.raises(InvalidArgument, match="is not valid Unicode"):
        check_tenant("\ud800")


def test_a_node_and_a_pin_come_back() -> None:
    for removal_horizon in (0, 1 << 60):
        op = put_node("näme", 77, removal_horizon)
        assert decode(op.key, op.value or b"") == NodeRecord("näme", 77, removal_horizon)
    assert delete_node("näme") == Op(op.key, None)
    op = put_unknown_nodes(1 << 60, 78)
    assert decode(op.key, op.value or b"") == UnknownNodesRecord(1 << 60, 78)
    for until_ms in (0, 1 << 50):
        op = pin(tenant_prefix("red"), b"key", until_ms=until_ms)
        assert op.value is not None
        assert decode(op.key, op.value) == PinRecord("red", b"key", until_ms)
    assert unpin(tenant_prefix("red"), b"key") == Op(op.key, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"p\x01\xffkey", b""),
        (b"nname", b"123"),
        (b"nname", b"12345"),
        (b"f", b"123"),
        (b"fname", bytes(12)),
        (b"d", b""),
        (b"d\0\xff", b""),
        (b"p\x03redkey", b"full"),
        (b"zoo", b""),
    ],
)
def test_what_is_no_record_is_refused(key: bytes, value: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(key, value)


@pytest.mark.parametrize("to", ["peers", "nvme"])
def test_a_drain_comes_back(to: str) -> None:
    op = put_drain("n\u00f61", to)
    assert op.value is not None
    assert decode(op.key, op.value) == DrainRecord("n\u00f61", to)
    assert delete_drain("n\u00f61") == Op(op.key, None)
    with pytest.raises(Corrupt):
        decode(op.key, b"tape")


def test_a_target_comes_back() -> None:
    op = put_target(tenant_prefix("red"), b"key", 3)
    assert op.value is not None
    assert decode(op.key, op.value) == TargetRecord("red", b"key", 3)
    assert delete_target(tenant_prefix("red"), b"key") == Op(op.key, None)
    with pytest.raises(Corrupt):
        decode(op.key, b"")


def test_a_removal_comes_back() -> None:
    op = removed(tenant_prefix("red"), b"key", 1 << 60)
    assert op.value is not None
    assert decode(op.key, op.value) == RemovedRecord("red", b"key", 1 << 60)
    assert removed(tenant_prefix("red"), b"key", None).value is None
    with pytest.raises(Corrupt, match="damaged"):
        decode(op.key, b"short")


def stored(*changes: list[Op]) -> list[DescriptionPart]:
    """The parts that are in the catalog after these operations."""
    catalog: dict[bytes, bytes] = {}
    for op in itertools.chain(*changes):
        if op.value is None:
            del catalog[op.key]
        else:
            assert len(op.value) <= 64 << 10
            catalog[op.key] = op.value
    parts = [decode(key, value) for key, value in catalog.items()]
    assert all(isinstance(part, DescriptionPart) and part.name == "näme" for part in parts)
    return parts  # type: ignore[return-value]


SMALL = Description(b"topology", b"transfer")
LARGE = Description(b"t" * (2 * PART_BYTES), bytes(PART_BYTES))


@pytest.mark.parametrize("description", [SMALL, LARGE, Description(b"", b"x"), Description(b"x", b"")])
def test_a_description_comes_back_whatever_its_size(description: Description) -> None:
    parts = stored(put_description("näme", description, Description()))
    assert join_description(parts) == join_description(parts[::-1]) == description
    assert put_description("näme", description, description) == []


def test_a_smaller_description_leaves_nothing_of_the_one_before() -> None:
    first, second = put_description("näme", LARGE, Description()), put_description("näme", SMALL, LARGE)
    assert (len(first), len(stored(first, second))) == (4, 1)
    assert join_description(stored(first, second)) == SMALL
    assert stored(first, second, put_description("näme", Description(), SMALL)) == []
    assert join_description([]) == Description()


def test_a_description_that_was_written_in_part_is_none() -> None:
    ops = put_description("näme", LARGE, Description())
    for missing in range(len(ops)):
        assert join_description(stored(ops[:missing] + ops[missing + 1 :])) == Description()
    mixed = stored(put_description("näme", SMALL, Description()), ops[1:])
    assert join_description(mixed) == Description()


def test_a_description_of_another_form_is_refused() -> None:
    with pytest.raises(Corrupt, match="form 2"):
        join_description([DescriptionPart("näme", 0, b"\2" + bytes(20))])


def test_what_may_be_granted_comes_back() -> None:
    op = put_granted(1 << 60)
    assert decode(op.key, op.value or b"") == GrantedRecord(1 << 60)


def test_that_a_node_was_stopped_comes_back() -> None:
    op = put_stopped("n\u00f61")
    assert op.value is not None
    assert decode(op.key, op.value) == StoppedRecord("n\u00f61")
    assert delete_stopped("n\u00f61") == Op(op.key, None)
    with pytest.raises(Corrupt):
        decode(op.key, b"x")
