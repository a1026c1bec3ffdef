"""Tests of config.py: parsing of LOCATION:SIZE."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.store.config import split_location


@pytest.mark.parametrize(
    ("text", "place", "size_bytes"),
    [("/mnt/nvme:1GiB", "/mnt/nvme", 1 << 30), ("cuda:0:8MiB", "cuda:0", 8 << 20), ("cpu:17", "cpu", 17)],
)
def test_split_location_uses_the_last_colon(text: str, place: str, size_bytes: int) -> None:
    assert split_location(text, "nvme") == (place, size_bytes)


@pytest.mark.parametrize("text", ["/mnt/nvme", ":1GiB", "", "/mnt/nvme:large", "/mnt/nvme:"])
def test_split_location_error_names_the_expected_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"LOCATION:SIZE|not a size"):
        split_location(text, "nvme")
