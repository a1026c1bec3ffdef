"""Promises of config.py: settings come from flags, environment and file as everywhere, and are held to their ranges."""

import pytest

from kvstore.handover.config import SECTION, HandoverSettings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings


def load(**flags: str) -> HandoverSettings:
    return load_settings(HandoverSettings, SECTION, flags=flags, environ={})


def test_the_defaults_are_in_their_ranges_and_all_can_be_set() -> None:
    assert load() == HandoverSettings()
    found = load(way="stream", direct_min_bytes="64KiB", staging_slots="3", deadline_s="1.5")
    assert (found.way, found.direct_min_bytes, found.staging_slots, found.deadline_s) == ("stream", 64 << 10, 3, 1.5)
    assert load_settings(HandoverSettings, SECTION, flags={}, environ={"KVSTORE_HANDOVER_WAY": "pull"}).way == "pull"


@pytest.mark.parametrize("wrong", [{"way": "throw"}, {"staging_slots": "0"}, {"staging_part_bytes": "1"}, {"deadline_s": "0"}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
        load(**wrong)
