"""What a put says of its objects."""

from typing import Any

import pytest

from kvstore.engines.mooncake.config import ReplicateConfig, SoftPinAction


@pytest.mark.parametrize("value", [-1, 1 << 64, "1", 1.5])
def test_a_time_that_is_none_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError):
        ReplicateConfig().soft_pin_ttl_ms = value


def test_a_time_goes_with_a_soft_pin_only() -> None:
    config = ReplicateConfig()
    config.soft_pin_ttl_ms = 1000
    assert not config.is_sound(1)
    config.soft_pin_action = SoftPinAction.ENABLE
    assert config.is_sound(1)


def test_there_is_a_group_for_each_object_or_none() -> None:
    config = ReplicateConfig()
    assert config.is_sound(3)
    config.group_ids = ["a", ""]
    assert (config.is_sound(2), config.is_sound(3)) == (True, False)
    assert "group_ids=['a', '']" in str(config)
