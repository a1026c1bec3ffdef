"""Configuration of puts: types of its fields, and which ones Mooncake takes."""

from typing import Any

import numpy as np
import pytest

from kvstore.engines.mooncake.config import ObjectDataType, ReplicateConfig, SoftPinAction, has_segments, is_sound, replicate_config

UNFIT: list[tuple[str, Any]] = [
    *(("soft_pin_ttl_ms", value) for value in (-1, 1 << 64, "1", 1.5)),
    *(("replica_num", -1), ("with_hard_pin", "yes"), ("group_ids", "g"), ("group_ids", [1]), ("preferred_segment", 5)),
    *(("data_type", 3), ("soft_pin_action", 1), ("preferred_segments", "x")),
]


@pytest.mark.parametrize(("name", "value"), UNFIT)
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


def test_another_object_is_no_configuration() -> None:
    with pytest.raises(TypeError):
        replicate_config({"replica_num": 1})
