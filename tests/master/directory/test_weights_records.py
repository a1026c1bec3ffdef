"""Tests of weights_records.py: records come back as they were, within a catalog's limits, and damaged ones are refused."""

import pytest

from kvstore.master.directory import records
from kvstore.master.directory.weights_records import (
    NamespaceRecord,
    Weights,
    WeightsRecord,
    WeightsVersion,
    delete_namespace,
    delete_weights,
    put_namespace,
    put_weights,
    read_weights,
)
from kvstore.protocol.errors import Corrupt

KEY = WeightsVersion(Weights("red", "base", "lora", "1f"), "v1")
MAX_KEY_BYTES = 400


@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize("is_retired", [False, True])
def test_a_version_comes_back(is_in_use: bool, is_retired: bool) -> None:
    record = WeightsRecord(KEY, 5, 7, is_in_use, is_retired, ("a", "b"))
    op = put_weights(record)
    assert op.value is not None
    assert records.decode(op.key, op.value) == record
    assert delete_weights(KEY) == (op.key, None)
    assert put_weights(WeightsRecord(KEY._replace(version=""), 5, 7, True, True, ())).key != op.key


def test_a_namespace_comes_back() -> None:
    record = NamespaceRecord("t" * 128, b"i" * 16, b"v" * 16, "model", b"form")
    op = put_namespace(record)
    assert op.value is not None
    assert records.decode(op.key, op.value) == record
    assert len(op.key) <= MAX_KEY_BYTES
    assert delete_namespace(record.tenant, record.id) == (op.key, None)


def test_a_damaged_record_is_refused() -> None:
    value = put_weights(WeightsRecord(KEY, 5, 7, True, False, ("a",))).value
    assert value is not None
    for damaged in (b"", value[:-1], value + b"x"):
        with pytest.raises(Corrupt, match="is damaged"):
            read_weights(b"w", damaged)
    with pytest.raises(Corrupt, match="is damaged"):
        records.decode(b"i\x03red" + bytes(16), bytes(17))
    with pytest.raises(Corrupt, match="has form 2, this release reads 1"):
        read_weights(b"w", b"\2" + value[1:])
