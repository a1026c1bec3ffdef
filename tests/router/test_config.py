"""Promises of config.py."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings
from kvstore.router.config import SECTION, RouterSettings, check_settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "model is not set: give --model NAME"),
        ({"model": "m", "listen": "0.0.0.0:0"}, "listen 0.0.0.0 is not loopback, and authentication is off"),
    ],
)
def test_conflicting_settings_are_refused_in_one_line(flags: dict[str, str], message: str) -> None:
    settings = load_settings(RouterSettings, SECTION, flags=flags, environ={})
    with pytest.raises(ConfigError) as refused:
        check_settings(settings)
    assert str(refused.value).startswith(message)
