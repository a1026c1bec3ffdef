"""Promises of in_force.py."""

from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.quotas.in_force import QuotasInForce
from kvstore.security.quotas.quota import UNLIMITED, Quota
from kvstore.security.quotas.tables import NamedLimits, Origins


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


def test_a_bad_file_at_the_start_is_refused_and_none_is_no_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        QuotasInForce(str(tmp_path / "none"))
    quotas = QuotasInForce("")
    assert (quotas.now, quotas.version, quotas.has_changed()) == (UNLIMITED, UNLIMITED.version, False)
    assert quotas.reread() == UNLIMITED


def test_what_operators_have_set_is_above_the_file_whichever_of_them_changed_last(tmp_path: Path) -> None:
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


def test_what_operators_have_set_is_laid_over_once_however_often_it_is_told() -> None:
    quotas = QuotasInForce("")
    operators: dict[str, NamedLimits] = {"red": {"pins": 3}}
    quotas.overlay(operators)
    first = quotas.now
    quotas.overlay(operators)
    assert quotas.now is first, "all tenants' limits are made anew for nothing"
    quotas.overlay({"red": {"pins": 4}})
    assert quotas.now.of("red") == Quota(pins=4)
