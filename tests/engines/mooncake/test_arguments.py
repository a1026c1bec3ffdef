"""Arguments are converted as Mooncake's binding does it, and refused with TypeError.

Configuration of puts: types of its fields, and which ones Mooncake takes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.engines.mooncake.arguments import (
    Flag,
    Integer,
    Number,
    Numbers,
    ObjectDataType,
    Part,
    ReplicateConfig,
    SoftPinAction,
    Text,
    Texts,
    arguments_converted,
    boolean,
    buffer,
    converted,
    encoded,
    has_segments,
    instance_of,
    integer,
    is_sound,
    list_of,
    part,
    text,
    unsigned,
    unsigned_list,
)
from kvstore.protocol.retention import MAX_RETENTION_S, Retention

FIT: list[tuple[Callable[[Any], Any], Any, Any]] = [
    *((text, "é", "é"), (text, b"ab", "ab"), (text, bytearray(b"ab"), "ab"), (unsigned, 2**64 - 1, 2**64 - 1), (unsigned, True, 1)),
    *((unsigned, np.uint64(2**63), 2**63), (integer, np.int16(-3), -3)),
    *((boolean, None, False), (boolean, np.bool_(1), True), (boolean, 2, True)),
    *((unsigned_list, [1, 2], [1, 2]), (unsigned_list, np.array([3, 4], np.int32), [3, 4]), (unsigned_list, (5, np.int64(6)), [5, 6])),
    *((unsigned_list, [], []), (list_of(text), ("a", b"b"), ["a", "b"]), (instance_of(list), [None], [None])),
]
UNFIT: list[tuple[Callable[[Any], Any], Any]] = [
    *((text, None), (text, 5), (text, "\ud800"), (unsigned, -1), (unsigned, 2**64), (unsigned, 1.0), (unsigned, "1"), (unsigned, None)),
    *((unsigned, np.float64(1)), (integer, 2**31), (integer, -(2**31) - 1)),
    *((boolean, "yes"), (boolean, []), (buffer, "text"), (buffer, None)),
    *((part, None), (unsigned_list, 5), (unsigned_list, "12"), (unsigned_list, b"12"), (unsigned_list, {1}), (unsigned_list, [1, -1])),
    *((unsigned_list, [1, 2**64]), (unsigned_list, iter([1])), (unsigned_list, {1: 2}), (unsigned_list, [1.5])),
    *((instance_of(list), (1,)), (instance_of(ReplicateConfig), {})),
]


@pytest.mark.parametrize(("convert", "value", "wanted"), FIT)
def test_value_is_converted(convert: Callable[[Any], Any], value: Any, wanted: Any) -> None:
    found = convert(value)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(("convert", "value"), UNFIT)
def test_value_of_another_type_raises(convert: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(TypeError):
        convert(value)


def test_bytes_that_are_no_text_keep_their_value() -> None:
    assert encoded(text(b"\xff\x00a")) == b"\xff\x00a"


def test_buffers_and_parts_are_taken_whole() -> None:
    value = np.arange(3, dtype=np.float32)
    assert buffer(value) is value
    assert bytes(part(b"abc")) == b"abc"
    for unfit in (value, np.zeros((2, 2), np.uint8)):
        with pytest.raises(RuntimeError):
            part(unfit)


@arguments_converted
class _Calls:
    name = "not a method"

    def mixed(self, key: Text, size: Number, force: Flag = False, rank: Integer = 0) -> Any:
        return [key, size, force, rank]

    def parts(self, key: Text, *parts: Part, sizes: Numbers = ()) -> Any:
        return [key, [bytes(one) for one in parts], sizes]

    def rest(self, *others: Any, keys: Texts) -> Any:
        return [others, keys]

    def plain(self, key: Any) -> Any:
        return key

    def _own(self, key: Text) -> Any:
        return key


def test_methods_convert_what_their_annotations_say() -> None:
    calls = _Calls()
    assert calls.mixed(b"k", np.int64(5), 1, rank=np.int8(2)) == ["k", 5, True, 2]  # type: ignore[arg-type]
    assert calls.parts("k", b"a", bytearray(b"b"), sizes=np.arange(2)) == ["k", [b"a", b"b"], [0, 1]]  # type: ignore[arg-type]
    assert calls.rest(1, "x", keys=("a",)) == [(1, "x"), ["a"]]
    assert calls.plain(5) == calls._own(5) == 5  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mixed\(\): incompatible argument: -1"):
        calls.mixed("k", -1)
    with pytest.raises(TypeError, match="no_such"):
        calls.mixed("k", 1, no_such=1)  # type: ignore[call-arg]


def test_function_without_conversions_is_itself() -> None:
    def plain(value: int) -> int:
        return value

    assert converted(plain) is plain


UNFIT_FIELDS: list[tuple[str, Any]] = [
    *(("soft_pin_ttl_ms", value) for value in (-1, 1 << 64, "1", 1.5)),
    *(("replica_num", -1), ("with_hard_pin", "yes"), ("group_ids", "g"), ("group_ids", [1]), ("preferred_segment", 5)),
    *(("data_type", 3), ("soft_pin_action", 1), ("preferred_segments", "x")),
]


@pytest.mark.parametrize(("name", "value"), UNFIT_FIELDS)
def test_field_of_another_type_raises(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        setattr(ReplicateConfig(), name, value)


def test_fields_are_converted_as_in_mooncake() -> None:
    config = ReplicateConfig()
    config.replica_num, config.soft_pin_ttl_ms = np.int64(2), np.uint32(7)  # type: ignore[assignment]
    config.with_hard_pin, config.preferred_segments = None, ("a",)  # type: ignore[assignment]
    config.data_type = ObjectDataType.WEIGHT
    assert (config.replica_num, config.soft_pin_ttl_ms, config.with_hard_pin, config.preferred_segments) == (2, 7, False, ["a"])
    with pytest.raises(AttributeError):
        config.no_such_field = 1


@pytest.mark.parametrize(
    ("action", "ttl_ms", "hint"),
    [
        (SoftPinAction.ENABLE, None, Retention(90, 1800.0)),
        (SoftPinAction.ENABLE, 1500, Retention(90, 1.5)),
        (SoftPinAction.ENABLE, (1 << 64) - 1, Retention(90, MAX_RETENTION_S)),
        (SoftPinAction.ENABLE, 0, None),
        (SoftPinAction.PRESERVE, None, None),
        (SoftPinAction.DISABLE, None, None),
    ],
)
def test_soft_pin_is_a_retention_hint(action: SoftPinAction, ttl_ms: int | None, hint: Retention | None) -> None:
    config = ReplicateConfig()
    config.soft_pin_action, config.soft_pin_ttl_ms = action, ttl_ms
    assert config.retention() == hint


def test_soft_pin_has_the_name_of_older_releases() -> None:
    config = ReplicateConfig()
    config.with_soft_pin = True
    assert config.soft_pin_action is SoftPinAction.ENABLE
    config.with_soft_pin = False
    assert config.retention() is None
    with pytest.raises(TypeError):
        config.with_soft_pin = "yes"  # type: ignore[assignment]


def test_time_needs_its_soft_pin() -> None:
    config = ReplicateConfig()
    config.soft_pin_ttl_ms = 1000
    assert not is_sound(config, 1)
    config.soft_pin_action = SoftPinAction.ENABLE
    assert is_sound(config, 1)


def test_groups_are_as_many_as_objects() -> None:
    config = ReplicateConfig()
    assert is_sound(config, 3)
    config.group_ids = ["a", ""]
    assert (is_sound(config, 2), is_sound(config, 3)) == (True, False)
    assert "group_ids=['a', '']" in str(config)


def test_no_replica_is_refused() -> None:
    config = ReplicateConfig()
    config.replica_num = 0
    assert not is_sound(config, 1)


def test_segments_are_as_many_as_replicas() -> None:
    config = ReplicateConfig()
    assert has_segments(config)
    config.preferred_segments = ["a", "b"]
    assert not has_segments(config)
    config.replica_num = 2
    assert has_segments(config)
