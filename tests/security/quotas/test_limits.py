"""Promises of limits.py."""

from pathlib import Path

import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.security.quotas.limits import (
    MAX_LIMIT,
    NO_TABLES,
    Origins,
    QuotasInForce,
    Tables,
    as_message,
    from_message,
    in_force,
    parse_limit,
    read_tables,
)
from kvstore.security.quotas.quota import NAMES, UNLIMITED, Quota, Quotas

FILE = Tables({"dram_bytes": 10, "pins": 1}, {"red": {"dram_bytes": 20, "connections": 4}})


def test_operator_limit_beats_tenant_table_beats_default() -> None:
    quotas = in_force(FILE, {"red": {"connections": None, "blocks": 5}, "green": {"pins": 7}})
    assert quotas.of("red") == Quota(dram_bytes=20, blocks=5, pins=1)
    assert quotas.of("green") == Quota(dram_bytes=10, pins=7)
    assert quotas.of("blue") == Quota(dram_bytes=10, pins=1)
    assert in_force(NO_TABLES, {}) == UNLIMITED


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
def test_bad_quotas_file_is_refused_with_name_and_key(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        read(tmp_path, text)
    assert "quotas.toml" in str(refusal.value)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot read the quotas file"):
        read_tables(str(tmp_path / "none"))
    monkeypatch.setattr("kvstore.security.quotas.limits.MAX_FILE_BYTES", 10)
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


def test_a_changed_file_is_in_force_once_it_was_read_again(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[default]\npins = 1")
    quotas = QuotasInForce(str(file))
    first = quotas.version
    assert not quotas.has_changed()
    file.write_text("[default]\npins = 22")
    assert quotas.has_changed()
    assert quotas.now.of("red") == Quota(pins=1)
    assert quotas.reread().of("red") == quotas.now.of("red") == Quota(pins=22)
    assert not quotas.has_changed()
    assert quotas.version == quotas.now.version != first


def test_a_bad_file_changes_nothing_and_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[default]\npins = 1")
    quotas = QuotasInForce(str(file))
    version = quotas.version
    file.write_text("[default]\npin = 1")
    with pytest.raises(ConfigError, match="the quotas file"):
        quotas.reread()
    assert quotas.now.of("red") == Quota(pins=1)
    assert (quotas.version, quotas.has_changed()) == (version, False)


def test_operator_limits_beat_the_file_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[tenants.red]\npins = 1")
    quotas = QuotasInForce(str(file))
    versions = [quotas.version]
    quotas.overlay({"red": {"blocks": 3}, "blue": {"pins": None}})
    versions.append(quotas.version)
    assert quotas.now.of("red") == Quota(pins=1, blocks=3)
    assert quotas.origins() == {"red": Origins(["blocks"], ["pins"]), "blue": Origins(["pins"], [])}
    file.write_text("[tenants.red]\nblocks = 44\n[default]\npins = 9")
    assert quotas.reread().of("red") == Quota(pins=9, blocks=3)
    assert quotas.now.of("blue") == Quota()
    versions.append(quotas.version)
    quotas.overlay({})
    assert quotas.now.of("red") == Quota(pins=9, blocks=44)
    assert len({*versions, quotas.version}) == 4, "nodes hear of each"


ALL = Quota(**{name: number for number, name in enumerate(NAMES)})


@pytest.mark.parametrize("quotas", [UNLIMITED, Quotas(ALL), Quotas(Quota(pins=0), {"red": ALL, "blue": Quota()})])
def test_what_is_told_is_what_is_heard(quotas: Quotas) -> None:
    message = pb.Quotas.FromString(as_message(quotas, quotas.version).SerializeToString())
    assert from_message(message) == quotas
    assert message.version == quotas.version
