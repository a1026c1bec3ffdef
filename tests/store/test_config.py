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


def test_split_location_refuses_a_list_of_folders() -> None:
    with pytest.raises(ConfigError, match=r"a node has one nvme tier: run a node for each, or stripe disks"):
        split_location("/mnt/a:1GiB,/mnt/b:1GiB", "nvme")
    assert split_location("/mnt/a,b:1GiB", "nvme") == ("/mnt/a,b", 1 << 30), "a folder may have a comma in its name"
