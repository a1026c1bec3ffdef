"""Promises of reading.py."""

from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.security.quotas import reading
from kvstore.security.quotas.reading import MAX_LIMIT, check_name, parse_limit, read_tables
from kvstore.security.quotas.tables import NO_TABLES, Tables

TEXT = """
[default]
dram_bytes = "1KiB"
connections = 64

[tenants.red]
dram_bytes = 4096
connections = "none"
pins = 0
"""


def read(folder: Path, text: str | bytes) -> Tables:
    path = folder / "quotas.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_tables(str(path))


def test_each_table_says_the_limits_that_it_names(tmp_path: Path) -> None:
    red = {"dram_bytes": 4096, "connections": None, "pins": 0}
    assert read(tmp_path, TEXT) == Tables({"dram_bytes": 1024, "connections": 64}, {"red": red})


def test_without_a_file_or_with_an_empty_one_nobody_has_a_limit(tmp_path: Path) -> None:
    assert read_tables("") is NO_TABLES
    assert read(tmp_path, "") == NO_TABLES


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenant]", r"has tenant: its tables are \[default\] and \[tenants.NAME\]"),
        ("tenants = 3", "tenants is a table of tables"),
        ("tenants.red = 3", r"\[tenants.red\] is a table"),
        ("default = 3", r"\[default\] is a table"),
        ("[default]\ndram = 3", r"\[default\]: unknown key dram; known are hbm_bytes, dram_bytes, "),
        ('[tenants.red]\ndram_bytes = "3 loaves"', r"\[tenants.red\] dram_bytes: '3 loaves' is not a size"),
        ('[default]\npins = "3"', r"\[default\] pins: '3' is no limit; write a whole number from 0 on, or \"none\""),
        ("[default]\npins = true", "pins: True is no limit"),
        ("[default]\npins = -1", "pins: -1 is no limit"),
        (f"[default]\nblocks = {1 << 63}", "is no limit"),
        ("[default]\ndram_bytes = 1.5", 'write a size such as "64GiB" from 0 on'),
        ("[default", "is not TOML"),
        (b"\xff", "cannot read the quotas file"),
    ],
)
def test_a_bad_file_is_refused_by_its_name_and_the_key_that_is_wrong(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        read(tmp_path, text)
    assert "quotas.toml" in str(refusal.value)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot read the quotas file"):
        read_tables(str(tmp_path / "none"))
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="has more than 10 B"):
        read(tmp_path, TEXT)


def test_a_limit_is_typed_as_a_size_or_a_number_or_none() -> None:
    assert [parse_limit("dram_bytes", text) for text in ("8GiB", "5", "none")] == [8 << 30, 5, None]
    assert [parse_limit("pins", text) for text in ("0", str(MAX_LIMIT), "none")] == [0, MAX_LIMIT, None]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("dram", "8GiB", "there is no limit 'dram'; there are: hbm_bytes, dram_bytes, "),
        ("dram_bytes", "much", "dram_bytes: 'much' is not a size"),
        ("pins", "8GiB", "pins: '8GiB' is no limit; write a whole number from 0 on"),
        ("pins", "-1", "pins: '-1' is no limit"),
        ("pins", "9" * 5000, "is no limit"),
        ("pins", str(MAX_LIMIT + 1), "is no limit"),
    ],
)
def test_what_is_no_limit_is_refused_by_its_name(name: str, text: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        parse_limit(name, text)


def test_a_limit_that_there_is_may_be_named() -> None:
    check_name("reservations")
