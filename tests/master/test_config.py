"""Tests of config.py."""

from kvstore.master.config import MasterSettings
from kvstore.protocol.settings import load_settings


def test_every_setting_has_a_default_that_is_in_its_range() -> None:
    assert load_settings(MasterSettings, "master", flags={}, environ={}) == MasterSettings()
